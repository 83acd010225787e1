"""Folders and lock files of one user.

A process keeps its folders locked, so that other processes can remove those of killed ones.
"""

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
    """Create a locked folder for a `with` block, and remove it at the end, except in a forked child.

    Args:
        parent: Parent folder.
        prefix: Prefix of the folder's name.
        mode: Permissions of the folder; 0o700 keeps other users out.
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
    """Create a private temporary folder, after removing those of killed processes with the same prefix."""
    parent = Path(tempfile.gettempdir())
    remove_unlocked_folders(parent.glob(f"{prefix}*"))
    with locked_folder(parent, prefix, mode=0o700) as folder:
        yield folder


@converts_arguments
def make_locked_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> tuple[Path, int]:
    """Create a folder and lock it; retry with another name if another process locks it first."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir(mode=mode)
        with suppress(FileNotFoundError):
            lock = os.open(folder, FLAGS | os.O_DIRECTORY)
            with suppress(FileNotFoundError, BlockingIOError):  # removed or locked by another process
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(folder), os.fstat(lock)):
                    return folder, lock
            os.close(lock)
            with suppress(OSError):
                folder.rmdir()


def remove_unlocked_folders(folders: Iterable[Path], *, lock_file: str = "", also_of: Container[int] = ()) -> None:
    """Remove folders whose processes have ended: a killed process releases its lock.

    Args:
        folders: Candidates; folders of live processes and other users are kept, missing ones are ignored.
        lock_file: File in each folder that a second process locks; the folder is removed once both have ended.
        also_of: Ids of other users whose folders are removed too.
    """
    for folder in folders:
        with suppress(OSError), ExitStack() as stack:
            _lock(folder, FLAGS | os.O_DIRECTORY, also_of, stack)
            if lock_file:
                with suppress(FileNotFoundError):
                    _lock(folder / lock_file, FLAGS, also_of, stack)
            shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path, flags: int, also_of: Container[int], stack: ExitStack) -> None:
    """Lock a path that belongs to this user or one of the given users.

    Raises:
        OSError: Another process holds the lock, or the path belongs to another user.
    """
    descriptor = os.open(path, flags)
    stack.callback(os.close, descriptor)
    user = os.fstat(descriptor).st_uid
    if user != os.geteuid() and user not in also_of:
        raise PermissionError(f"{path} belongs to user {user}")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@converts_arguments
def open_lock_file(path: Path) -> int:
    """Open or create a lock file that other users cannot open, and return its descriptor, not yet locked.

    Raises:
        OSError: The path is a link, or the file cannot be opened or created.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def cache_folder(project: str) -> Path | None:
    """Return a project's folder in the user's caches, and create it.

    Returns:
        A writable folder; None if there is none, such as in a container whose user has no home folder, or whose HOME
        belongs to another user. Callers then compute again.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / project
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: HOME is unset, and the user has no entry in passwd
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
