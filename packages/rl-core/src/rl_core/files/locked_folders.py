"""Folders that a process locks while it lives, so that others can remove what a killed one left."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def locked_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder under a lock; what is left of it at the end goes."""
    folder, lock = _make_locked(parent, prefix, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_locked(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """A folder and its lock; another one where the first was swept before it was locked."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir(mode=mode)
        with suppress(FileNotFoundError):
            lock = os.open(folder, FLAGS | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(folder), os.fstat(lock)):
                    return folder, lock
            os.close(lock)


def remove_unlocked_folders(folders: Iterable[Path], *, lock_file: str = "") -> None:
    """Remove folders whose processes are gone: a killed process holds no lock.

    Args:
        folders: Those of live processes, of other users, and those that are gone meanwhile stay as they are.
        lock_file: The file in each that has the lock; the folder itself where it is empty.
    """
    for folder in folders:
        with suppress(OSError):
            lock = os.open(folder / lock_file, FLAGS)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
