"""Folders that a process locks while it lives, so that others can remove what a killed one left."""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rl_core.record_fields import converts_arguments

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
@converts_arguments
def locked_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder under a lock; what is left of it at the end goes, unless this is a fork of the process that made it.

    Args:
        parent: Where to make it.
        prefix: What its name begins with.
        mode: Of the folder; 0o700 keeps other users out.
    """
    folder, lock = make_locked_folder(parent, prefix, mode=mode)
    maker = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that no other user can enter; those of killed processes with this prefix are removed first."""
    parent = Path(tempfile.gettempdir())
    remove_unlocked_folders(parent.glob(f"{prefix}*"))
    with locked_folder(parent, prefix, mode=0o700) as folder:
        yield folder


@converts_arguments
def make_locked_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it; another folder where the first one was taken before that."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir(mode=mode)
        with suppress(FileNotFoundError):
            lock = os.open(folder, FLAGS | os.O_DIRECTORY)
            with suppress(FileNotFoundError, BlockingIOError):  # swept, or locked by whoever may read it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(folder), os.fstat(lock)):
                    return folder, lock
            os.close(lock)
            with suppress(OSError):
                folder.rmdir()


def remove_unlocked_folders(folders: Iterable[Path], *, lock_file: str = "", also_of: Container[int] = ()) -> None:
    """Remove folders whose processes are gone: a killed process holds no lock.

    Args:
        folders: Those of live processes, of other users, and those that are gone meanwhile stay as they are.
        lock_file: A file in each that a second process locks beside the one that made the folder: both must be gone.
        also_of: User ids whose folders go as well; others keep theirs.
    """
    for folder in folders:
        with suppress(OSError), ExitStack() as stack:
            _lock(folder, FLAGS | os.O_DIRECTORY, also_of, stack)
            if lock_file:
                with suppress(FileNotFoundError):
                    _lock(folder / lock_file, FLAGS, also_of, stack)
            shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path, flags: int, also_of: Container[int], stack: ExitStack) -> None:
    """Hold the lock of a path of this user, or of one of the others named.

    Raises:
        OSError: Another process holds it, or it is another user's.
    """
    descriptor = os.open(path, flags)
    stack.callback(os.close, descriptor)
    user = os.fstat(descriptor).st_uid
    if user != os.geteuid() and user not in also_of:
        raise PermissionError(f"{path} is another user's")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
