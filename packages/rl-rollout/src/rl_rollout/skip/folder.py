"""Entries on a local disk.

A writer builds an entry in a locked temporary folder, flushes it to disk and renames it: an entry appears complete or
not at all. A temporary folder without a lock belongs to a dead writer and is removed.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files import make_locked_folder, preview_path, sync_folder
from rl_rollout.skip.manifest import MANIFEST, TOKEN_BYTES, EntryKey

MAX_DEPTH = 4
MAX_FILES = 200_000
NUM_FLUSHES = 8
"""Number of folders flushed in parallel; in sequence, each might wait for its own file system commit."""
BROKEN = "broken"
WRITING, REMOVING = ".writing-", ".removing-"
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalFolder:
    """Entries in a folder of a local disk."""

    def __init__(self, root: Path) -> None:
        """Set the folder; the first writer creates it."""
        self._root = root

    def path_of(self, name: str) -> str:
        """Return an entry's path."""
        return str(self._root / name)

    def exists(self) -> bool:
        """Return True if the folder exists."""
        return self._root.is_dir()

    def names(self) -> list[str]:
        """Return the names of all entries, including broken ones."""
        try:
            found = os.listdir(self._root)  # noqa: PTH208 (names alone)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"{self._root} must be a readable folder: {error.strerror}.") from error
        return sorted(name for name in found if EntryKey.parse(name) is not None)

    @contextmanager
    def open(self, name: str) -> Iterator["LocalFiles | None"]:
        """Open an entry's files; yield None if it does not exist.

        The files stay readable after the entry is renamed, until they are deleted.

        Raises:
            BrokenEntryError: The entry is a link or not a folder.
        """
        path = self.path_of(name)
        try:
            descriptor = os.open(path, FOLDER_FLAGS)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            reason = "it is a link or not a folder" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
            raise BrokenEntryError(path, f"it must be a readable folder: {reason}") from None
        try:
            yield LocalFiles(descriptor, path)
        finally:
            os.close(descriptor)

    @contextmanager
    def begin(self, name: str) -> Iterator["LocalWriter"]:
        """Create a new entry in a locked temporary folder, which is removed unless it is published.

        Raises:
            CacheError: The entry cannot be written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            aside, lock = make_locked_folder(self._root, f"{WRITING}{name}-")
        except OSError as error:
            raise CacheError(
                f"rollouts cannot be stored in {self._root}: {error}. Give a writable rollout_cache.directory."
            ) from error
        try:
            yield LocalWriter(aside, self._root / name)
        except OSError as error:
            raise CacheError(
                f"rollouts could not be stored as {self._root / name}: {error}. Make room (rollout_cache.max_bytes "
                "limits the cache's size), or disable the cache."
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # no longer there if it was published
            os.close(lock)

    def remove(self, name: str) -> None:
        """Rename an entry, then delete it: readers never see a partial entry."""
        taken = self.take_away(name)
        if taken is not None:
            _remove_tree(taken)

    def take_away(self, name: str) -> Path | None:
        """Rename an entry for removal; return its new path, or None if it does not exist."""
        aside = self._root / f"{REMOVING}{secrets.token_hex(TOKEN_BYTES)}"
        try:
            (self._root / name).rename(aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"{self._root / name} cannot be removed: {error}. Remove it manually.") from error
        return aside

    def set_aside(self, name: str) -> str | None:
        """Move an entry into `broken`; return its new path, or None if it does not exist."""
        target = self._root / BROKEN / f"{name}-{secrets.token_hex(TOKEN_BYTES)}"
        try:
            target.parent.mkdir(exist_ok=True)
            if target.parent.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(target.parent))
            (self._root / name).rename(target)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(
                f"{self._root / name} is broken and cannot be moved to {target.parent}: {error}. Remove both."
            ) from error
        return str(target)

    def set_aside_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each item in `broken`."""
        folder = self._root / BROKEN
        if folder.is_symlink() or not folder.is_dir():
            return {}
        return {path.name: _tree_bytes(path) for path in sorted(folder.iterdir())}

    def remove_set_aside(self, name: str) -> None:
        """Remove an item from `broken`."""
        _remove_tree(self._root / BROKEN / name)

    def prepare(self) -> None:
        """Create the folder and remove the leftovers of dead writers.

        Raises:
            CacheError: The folder cannot be created, or it is empty and not writable.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "it is a file" if self._root.exists() else error.strerror
            raise CacheError(f"{self._root} cannot be created for a skip cache: {reason}.") from error
        if os.access(self._root, os.W_OK | os.X_OK):
            for name in self.leftovers():
                self.remove_leftover(name)
        elif not self.names():  # a read-only cache can still be replayed
            raise CacheError(f"{self._root} must be writable by this user for a skip cache without entries; it is not.")

    def check(self) -> None:
        """Check that the folder exists or can be created, without creating it.

        Raises:
            CacheError: The path is a file, or its parent is not a writable folder.
        """
        if self._root.exists() and not self._root.is_dir():
            raise CacheError(f"{self._root} must be an existing or new folder; it is a file.")
        above = next(path for path in (self._root, *self._root.absolute().parents) if path.exists())
        if not above.is_dir() or (above != self._root and not os.access(above, os.W_OK | os.X_OK)):
            raise CacheError(f"{self._root} cannot be created: {above} is not a folder that this user can write.")

    def leftovers(self) -> dict[str, int]:
        """Return the size in bytes of each temporary folder that is unlocked or was being removed."""
        if not self._root.is_dir():
            return {}
        paths = sorted(path for path in self._root.iterdir() if path.name.startswith((WRITING, REMOVING)))
        return {path.name: _tree_bytes(path) for path in paths if path.name.startswith(REMOVING) or _is_unlocked(path)}

    def remove_leftover(self, name: str) -> None:
        """Remove a leftover, unless it has been locked or removed since."""
        path = self._root / name
        if name.startswith(REMOVING):
            _remove_tree(path)
        elif name.startswith(WRITING) and not path.is_symlink():
            with contextlib.suppress(OSError), _locked(path):
                _remove_tree(path)


class LocalFiles:
    """Files of one entry, read relative to its open folder; links are never followed."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Set the descriptor of the open folder, which the caller closes, and its path for messages."""
        self._descriptor = descriptor
        self._path = path

    def is_current(self) -> bool:
        """Return False if the entry was removed or replaced since it was opened; its files may then be missing."""
        return _is_at(self._path, self._descriptor)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file, by its path relative to the entry.

        Raises:
            BrokenEntryError: The entry has a link or device, too many files or too many folder levels.
        """
        found: dict[str, int] = {}
        try:
            self._collect(self._descriptor, "", found, depth=0)
        except OSError as error:  # it is being removed, or this user may not read it
            raise BrokenEntryError(self._path, f"its files cannot be listed: {error.strerror}") from None
        return found

    def read(self, path: str, size_bytes: int) -> memoryview:
        """Read a complete file into writable memory.

        Raises:
            BrokenEntryError: The file is missing, not a plain file, or of another size.
        """
        where = f"{self._path}/{path}"
        try:
            with self._open(path) as descriptor:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise BrokenEntryError(where, "it must be a plain file")
                if status.st_size != size_bytes:
                    raise BrokenEntryError(where, f"it must have {size_bytes} bytes; found {status.st_size}")
                content = np.empty(size_bytes, dtype=np.uint8).data  # numpy memory uses large pages, bytes do not
                with open(descriptor, "rb", closefd=False, buffering=0) as stream:
                    num_read = stream.readinto(content)
        except OSError as error:
            raise BrokenEntryError(where, f"it must be a readable plain file: {error.strerror}") from None
        if num_read != size_bytes:
            raise BrokenEntryError(where, f"reading it must return {size_bytes} bytes; found {num_read}")
        return content

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """Open each folder of the path in turn, so that the system refuses links at every level."""
        *folders, name = path.split("/")
        with contextlib.ExitStack() as stack:
            descriptor = self._descriptor
            for folder in folders:
                descriptor = os.open(folder, FOLDER_FLAGS, dir_fd=descriptor)
                stack.callback(os.close, descriptor)
            descriptor = os.open(name, READ_FLAGS, dir_fd=descriptor)
            stack.callback(os.close, descriptor)
            yield descriptor

    def _collect(self, descriptor: int, stem: str, found: dict[str, int], *, depth: int) -> None:
        with os.scandir(descriptor) as items:
            for item in items:
                path = f"{stem}{item.name}"
                where = f"{self._path}/{preview_path(path)}"
                if len(found) >= MAX_FILES or depth >= MAX_DEPTH:
                    raise BrokenEntryError(
                        where, f"an entry has at most {MAX_FILES} files, nested at most {MAX_DEPTH} deep"
                    )
                status = os.stat(item.name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found[path] = status.st_size
                elif stat.S_ISDIR(status.st_mode):
                    below = os.open(item.name, FOLDER_FLAGS, dir_fd=descriptor)
                    try:
                        self._collect(below, f"{path}/", found, depth=depth + 1)
                    finally:
                        os.close(below)
                else:
                    kind = "a link" if stat.S_ISLNK(status.st_mode) else "a pipe, a socket or a device"
                    raise BrokenEntryError(where, f"it must be a plain file or folder; it is {kind}")


class LocalWriter:
    """Writer of an entry in a temporary folder."""

    def __init__(self, aside: Path, target: Path) -> None:
        """Set the temporary folder and the entry's final path."""
        self._aside = aside
        self._target = target

    def write(self, path: str, *parts: bytes | memoryview) -> None:
        """Write a file from parts and flush it to disk. Safe to call from several threads."""
        file = self._aside / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, manifest: bytes, *, replace: bool) -> bool:
        """Write the manifest, flush every folder, and rename the entry to its final path.

        Args:
            manifest: Content of the manifest, which is written last.
            replace: Replace an existing entry of this name.

        Returns:
            False if another entry was there first and stays.
        """
        self.write(MANIFEST, manifest)
        folders = [folder for folder, _, _ in os.walk(self._aside)]
        with ThreadPoolExecutor(NUM_FLUSHES, "skip-cache") as threads:
            list(threads.map(sync_folder, folders))
        replaced: list[Path | None] = []
        while not _rename_new(self._aside, self._target):
            if not replace:
                return False
            replaced.append(LocalFolder(self._target.parent).take_away(self._target.name))
        sync_folder(self._target.parent)
        for old in replaced:  # after the new one is in place, so that readers miss the entry only for an instant
            if old is not None:
                _remove_tree(old)
        return True


def _rename_new(source: Path, target: Path) -> bool:
    """Rename a folder; return False if the target exists."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _is_at(path: str | Path, descriptor: int) -> bool:
    """Return True if the path still leads to the open folder."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_unlocked(path: Path) -> bool:
    try:
        with _locked(path):
            return True
    except OSError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a folder while the context is open.

    Raises:
        OSError: Another process has the lock, or the folder does not exist.
    """
    lock = os.open(path, FOLDER_FLAGS)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> None:
    """Remove a folder recursively, or a single file or link without following it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _tree_bytes(path: Path) -> int:
    total = 0
    files: Sequence[Path] = [path] if path.is_symlink() or not path.is_dir() else list(path.rglob("*"))
    for file in files:
        with contextlib.suppress(OSError):  # removed since it was listed
            total += 0 if file.is_dir() and not file.is_symlink() else file.lstat().st_size
    return total
