"""Entries on a local disk.

A writer builds an entry in a temporary folder, flushes it to disk and renames it, so that it appears complete or not at
all. The writer locks what it builds. Folders without a lock were left by a dead writer, and are removed.
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
from rl_core.files import make_locked_folder, shown_path, sync_folder
from rl_rollout.skip.manifest import MANIFEST, TOKEN_BYTES, EntryKey

MAX_DEPTH = 4
MAX_FILES = 200_000
NUM_FLUSHES = 8
"""Folders that are flushed at once: one after the other, each may wait for a commit of its own."""
BROKEN = "broken"
WRITING, REMOVING = ".writing-", ".removing-"
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalFolder:
    """Entries in a folder of a local disk."""

    def __init__(self, root: Path) -> None:
        """Name the folder; it is made by the first writer."""
        self._root = root

    def path_of(self, name: str) -> str:
        """Where an entry is."""
        return str(self._root / name)

    def exists(self) -> bool:
        """True when there is a folder."""
        return self._root.is_dir()

    def names(self) -> list[str]:
        """Names of what is, or claims to be, an entry."""
        try:
            found = os.listdir(self._root)  # noqa: PTH208 (names alone)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"{self._root} must be a folder that can be read: {error.strerror}.") from error
        return sorted(name for name in found if EntryKey.parse(name) is not None)

    @contextmanager
    def open(self, name: str) -> Iterator["LocalFiles | None"]:
        """An entry's files, held open: they stay readable as long as nobody deletes them. None where there is none.

        Raises:
            BrokenEntryError: It is a link, or no folder.
        """
        path = self.path_of(name)
        try:
            descriptor = os.open(path, FOLDER_FLAGS)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            reason = "it is a link or no folder" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
            raise BrokenEntryError(path, f"it must be a folder that can be read: {reason}") from None
        try:
            yield LocalFiles(descriptor, path)
        finally:
            os.close(descriptor)

    @contextmanager
    def begin(self, name: str) -> Iterator["LocalWriter"]:
        """A new entry, built aside under a lock; nothing of it stays where it is not published.

        Raises:
            CacheError: It cannot be written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            aside, lock = make_locked_folder(self._root, f"{WRITING}{name}-")
        except OSError as error:
            raise CacheError(
                f"rollouts cannot be stored in {self._root}: {error}. Give a skip.directory that can be written."
            ) from error
        try:
            yield LocalWriter(aside, self._root / name)
        except OSError as error:
            raise CacheError(
                f"rollouts could not be stored as {self._root / name}: {error}. Make room (skip.max_bytes bounds what "
                "is kept), or turn the cache off."
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # published, it is no longer there
            os.close(lock)

    def remove(self, name: str) -> None:
        """Rename an entry, then remove it: it is never seen by half."""
        taken = self.take_away(name)
        if taken is not None:
            _remove_tree(taken)

    def take_away(self, name: str) -> Path | None:
        """Rename an entry that is to be removed; gives where it is now, or None where it is gone."""
        aside = self._root / f"{REMOVING}{secrets.token_hex(TOKEN_BYTES)}"
        try:
            (self._root / name).rename(aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"{self._root / name} cannot be removed: {error}. Remove it by hand.") from error
        return aside

    def set_aside(self, name: str) -> str | None:
        """Move an entry below `broken`; gives where it is now, or None where it is gone."""
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
                f"{self._root / name} is broken, and cannot be moved to {target.parent}: {error}. Remove both."
            ) from error
        return str(target)

    def set_aside_sizes(self) -> dict[str, int]:
        """Bytes of what was set aside."""
        folder = self._root / BROKEN
        if folder.is_symlink() or not folder.is_dir():
            return {}
        return {path.name: _tree_bytes(path) for path in sorted(folder.iterdir())}

    def remove_set_aside(self, name: str) -> None:
        """Remove what was set aside."""
        _remove_tree(self._root / BROKEN / name)

    def prepare(self) -> None:
        """Make the folder, and remove what writers left that died.

        Raises:
            CacheError: It cannot be made or written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "it is a file" if self._root.exists() else error.strerror
            raise CacheError(f"{self._root} cannot be made for a skip cache: {reason}.") from error
        if os.access(self._root, os.W_OK | os.X_OK):
            for name in self.leftovers():
                self.remove_leftover(name)
        elif not self.names():  # of what is stored already, replays are enough
            raise CacheError(f"{self._root} must be a folder that this user can write, for a skip cache; it is not.")

    def check(self) -> None:
        """Refuse a place where there can be no such folder; nothing is made.

        Raises:
            CacheError: There can be none.
        """
        if self._root.exists() and not self._root.is_dir():
            raise CacheError(f"{self._root} must be a folder, or a place for a new one; it is a file.")
        above = next(path for path in (self._root, *self._root.absolute().parents) if path.exists())
        if not above.is_dir() or (above != self._root and not os.access(above, os.W_OK | os.X_OK)):
            raise CacheError(f"{self._root} cannot be made: {above} is no folder that this user can write.")

    def leftovers(self) -> dict[str, int]:
        """Bytes of what has no lock, or was being removed."""
        if not self._root.is_dir():
            return {}
        paths = sorted(path for path in self._root.iterdir() if path.name.startswith((WRITING, REMOVING)))
        return {path.name: _tree_bytes(path) for path in paths if path.name.startswith(REMOVING) or _is_unlocked(path)}

    def remove_leftover(self, name: str) -> None:
        """Remove it, unless it is locked by now, or gone."""
        path = self._root / name
        if name.startswith(REMOVING):
            _remove_tree(path)
        elif name.startswith(WRITING) and not path.is_symlink():
            with contextlib.suppress(OSError), _locked(path):
                _remove_tree(path)


class LocalFiles:
    """The files of one entry, below an open folder; no path leaves it, and no link is followed."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Take the open folder; the caller closes it."""
        self._descriptor = descriptor
        self._path = path

    def is_current(self) -> bool:
        """False when the entry was removed or replaced since it was opened: what it lacks then says nothing of it."""
        return _is_at(self._path, self._descriptor)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by its path in the entry.

        Raises:
            BrokenEntryError: There is a link, a device, or too much.
        """
        found: dict[str, int] = {}
        try:
            self._collect(self._descriptor, "", found, depth=0)
        except OSError as error:  # it is being removed, or not ours to read
            raise BrokenEntryError(self._path, f"its files cannot be listed: {error.strerror}") from None
        return found

    def read(self, path: str, size_bytes: int) -> memoryview:
        """A whole file, in memory that is the caller's to change.

        Raises:
            BrokenEntryError: It is missing, no plain file, or of another size.
        """
        where = f"{self._path}/{path}"
        try:
            with self._open(path) as descriptor:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise BrokenEntryError(where, "it must be a plain file")
                if status.st_size != size_bytes:
                    raise BrokenEntryError(where, f"it must have {size_bytes} bytes; found {status.st_size}")
                content = np.empty(size_bytes, dtype=np.uint8).data  # in large pages, which bytes do not get
                with open(descriptor, "rb", closefd=False, buffering=0) as stream:
                    num_read = stream.readinto(content)
        except OSError as error:
            raise BrokenEntryError(where, f"it must be a plain file that can be read: {error.strerror}") from None
        if num_read != size_bytes:
            raise BrokenEntryError(where, f"it must give {size_bytes} bytes; found {num_read}")
        return content

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """Open folder after folder: a link in any place is refused by the system."""
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
                where = f"{self._path}/{shown_path(path)}"
                if len(found) >= MAX_FILES or depth >= MAX_DEPTH:
                    raise BrokenEntryError(where, f"an entry has at most {MAX_FILES} files, {MAX_DEPTH} deep")
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
    """An entry that is built aside."""

    def __init__(self, aside: Path, target: Path) -> None:
        """Take the folder that was made for it."""
        self._aside = aside
        self._target = target

    def write(self, path: str, *parts: bytes | memoryview) -> None:
        """Add a file of these parts, flushed to the disk; several threads may do so at once."""
        file = self._aside / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, manifest: bytes, *, replace: bool) -> bool:
        """Write the manifest, flush every folder, and rename the entry into its place.

        Args:
            manifest: Written last.
            replace: Whether it takes the place of an entry of this name.

        Returns:
            False where another one was there first, which stays.
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
        for old in replaced:  # once the new one is there: readers find none for an instant alone
            if old is not None:
                _remove_tree(old)
        return True


def _rename_new(source: Path, target: Path) -> bool:
    """Rename a folder unless there is something of the new name."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _is_at(path: str | Path, descriptor: int) -> bool:
    """True when an open folder is the one that a path names."""
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
    """Hold a folder's lock.

    Raises:
        OSError: Another holds it, or it is gone.
    """
    lock = os.open(path, FOLDER_FLAGS)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> None:
    """Remove a folder with all below it, or a link or file alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _tree_bytes(path: Path) -> int:
    total = 0
    files: Sequence[Path] = [path] if path.is_symlink() or not path.is_dir() else list(path.rglob("*"))
    for file in files:
        with contextlib.suppress(OSError):  # gone since it was listed
            total += 0 if file.is_dir() and not file.is_symlink() else file.lstat().st_size
    return total
