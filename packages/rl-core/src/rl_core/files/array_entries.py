"""Entries of arrays in a folder or at a URL, each in one file (`entry_zip`), complete or absent.

A writer fills a file of another name, flushes it and renames it; an object store gets whole objects. Needs the extra
`zarr`.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from numpy.typing import NDArray

from rl_core.data.records import Json
from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_core.files.durable import sync_folder
from rl_core.files.entry_zip import FORMAT, Entry, write_entry

__all__ = ["BROKEN", "FORMAT", "SUFFIX", "Entry", "EntryFolder", "EntryTooLargeError"]

SUFFIX = ".zarr.zip"
BROKEN = "broken"
WRITING = ".writing-"


class EntryTooLargeError(CacheError):
    """An entry would exceed the maximum size of a file."""


class EntryFolder:
    """Entries in one folder or below one URL, which any number of processes may share."""

    def __init__(self, directory: str, *, max_entry_bytes: int = 1 << 34) -> None:
        """Set the directory, without reading or creating it.

        Args:
            directory: Local path, or a URL that fsspec supports.
            max_entry_bytes: Maximum memory of an entry's arrays; a larger one is neither read nor written.

        Raises:
            CacheError: fsspec does not support the URL.
            MissingExtraError: zarr, fsspec or a package that the URL needs is not installed.
        """
        try:
            import fsspec
            import zarr  # noqa: F401
            from fsspec.implementations.local import LocalFileSystem

            self._fs, root = fsspec.core.url_to_fs(directory, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtraError(
                f"entries in {directory} need a package that is not installed: {error}. Install rl-core[zarr], or the "
                "package of the URL."
            ) from error
        except (ValueError, RuntimeError) as error:
            raise CacheError(f"{directory} cannot be used: {error}. Give a folder or a URL.") from error
        self._root = root.rstrip("/")
        self._shown = directory.rstrip("/")
        self._max_entry_bytes = max_entry_bytes
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def path_of(self, name: str) -> str:
        """Return an entry's path or URL."""
        return f"{self._shown}/{name}{SUFFIX}"

    def exists(self) -> bool:
        """Return True if the folder exists, or there is an object below the URL."""
        with self._failing("cannot be looked up", self._shown):
            return bool(self._fs.isdir(self._root))

    def names(self) -> list[str]:
        """Return the names of all entries, including broken ones, sorted."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every entry by name."""
        return self._sizes(self._root)

    def others(self) -> list[str]:
        """Return the names of all other files and folders, such as entries of an earlier format."""
        with self._failing("cannot be listed", self._shown), suppress(FileNotFoundError):
            names = (path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False))
            return sorted(name for name in names if not name.endswith(SUFFIX))
        return []

    def broken(self) -> dict[str, int]:
        """Return the size in bytes of each entry that was set aside, by its name in `broken`."""
        return self._sizes(self._aside())

    def prepare(self) -> None:
        """Create a local folder, and remove the leftovers of dead writers; do nothing for a URL.

        Raises:
            CacheError: The folder cannot be created, or it is empty and not writable.
        """
        if not self.is_local:
            return
        try:
            Path(self._root).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"{self._shown} cannot be created: {error.strerror}. Choose another folder.") from error
        if os.access(self._root, os.W_OK | os.X_OK):
            for name in self.leftovers():
                self.remove_leftover(name)
        elif not self.names():  # a read-only folder can still be read
            raise CacheError(f"{self._shown} is empty and cannot be written by this user. Choose another folder.")

    def check(self) -> None:
        """Check that a local folder exists or can be created, without creating it; a URL is not contacted.

        Raises:
            CacheError: The path is a file, or its parent is not a writable folder.
        """
        if not self.is_local:
            return
        root = Path(self._root)
        above = next(path for path in (root, *root.parents) if path.exists())
        if above == root and not root.is_dir():
            raise CacheError(f"{self._shown} must be an existing or new folder; it is a file.")
        if above != root and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise CacheError(f"{self._shown} cannot be created: {above} is not a folder that this user can write.")

    @contextmanager
    def open(self, name: str) -> Iterator["Entry | None"]:
        """Open an entry; yield None if it does not exist. It stays readable if it is replaced or removed meanwhile.

        Raises:
            BrokenEntryError: It is not an entry that `write` made.
            CacheError: The store cannot be read.
        """
        with ExitStack() as stack:
            stack.enter_context(self._failing("cannot be read", self.path_of(name)))
            stream = self._stream(name, stack)
            path = self.path_of(name)
            yield None if stream is None else Entry(stream, path=path, max_bytes=self._max_entry_bytes)

    def write(
        self,
        name: str,
        description: Mapping[str, Json],
        arrays: Iterable[tuple[str, NDArray[Any]]],
        *,
        compress: bool = True,
        replace: bool = False,
        max_bytes: int | None = None,
    ) -> int | None:
        """Store an entry. A crash at any point leaves the earlier one, the new one, or none.

        Args:
            name: Name of the entry.
            description: JSON to store with the arrays.
            arrays: 1-D arrays with their names; each is stored before the next is requested.
            compress: Compress the arrays with lz4.
            replace: Replace an existing entry.
            max_bytes: Maximum size of the entry's file; None sets no limit.

        Returns:
            Size of the entry in bytes; None if another entry of this name was there first and stays.

        Raises:
            EntryTooLargeError: The file exceeds `max_bytes`; no part of it remains.
            CacheError: The entry cannot be stored, or its arrays are too large; no part of it remains.
        """
        target = f"{self._root}/{name}{SUFFIX}"
        hint = " Make room, or choose another folder."
        with self._failing("could not be stored", self.path_of(name), hint), self._new_file(name) as (stream, path):
            size = write_entry(stream, description, arrays, compress=compress, max_bytes=self._max_entry_bytes)
            if max_bytes is not None and size > max_bytes:
                raise EntryTooLargeError(f"{name} would exceed max_bytes = {max_bytes}; it was not stored.")
            if self.is_local:
                is_stored = _place(Path(path), Path(target), replace=replace)
                sync_folder(self._root)
            elif is_stored := replace or not self._has(target):
                self._fs.put_file(path, target)
            return size if is_stored else None

    def remove(self, name: str) -> None:
        """Remove an entry; `broken/NAME` removes one that was set aside."""
        with self._failing("cannot be removed", self.path_of(name)), suppress(FileNotFoundError):
            path = f"{self._root}/{name}{SUFFIX}"
            if self.is_local and Path(path).is_dir() and not Path(path).is_symlink():
                shutil.rmtree(path)  # a folder in the place of an entry
            else:
                self._fs.rm_file(path)

    def set_aside(self, name: str) -> str | None:
        """Move an entry into `broken`; return its new path, or None if it does not exist."""
        aside = f"{BROKEN}/{name}-{secrets.token_hex(8)}"
        source, target = (f"{self._root}/{each}{SUFFIX}" for each in (name, aside))
        with self._failing("cannot be moved into broken", self.path_of(name)):
            try:
                if self.is_local:
                    Path(self._aside()).mkdir(exist_ok=True)
                    Path(source).replace(target)
                else:
                    self._fs.cp_file(source, target)
                    self._fs.rm_file(source)
            except FileNotFoundError:
                return None
        return self.path_of(aside)

    def leftovers(self) -> dict[str, int]:
        """Return the size in bytes of each file of a writer that died, by name."""
        if not self.is_local or not Path(self._root).is_dir():
            return {}
        found = {}
        for path in sorted(Path(self._root).glob(f"{WRITING}*")):
            with suppress(OSError), _locked(path) as descriptor:
                if not stat.S_ISDIR((status := os.fstat(descriptor)).st_mode):
                    found[path.name] = status.st_size
        return found

    def remove_leftover(self, name: str) -> None:
        """Remove a leftover, unless it has been removed since."""
        path = Path(self._root, name)
        with suppress(OSError), _locked(path):
            path.unlink(missing_ok=True)

    # -- internal

    def _sizes(self, folder: str) -> dict[str, int]:
        with self._failing("cannot be listed", self._shown):
            try:
                found = self._fs.ls(folder, detail=True)
            except FileNotFoundError:
                return {}
        names = {
            each["name"].rpartition("/")[2]: int(each.get("size") or 0)
            for each in found
            if each["name"].strip("/") != folder.strip("/")  # a file in the place of the folder lists itself
            and (self.is_local or each["type"] != "directory")
        }
        return {
            name.removesuffix(SUFFIX): size
            for name, size in sorted(names.items())
            if name.endswith(SUFFIX) and not name.startswith(".")
        }

    def _aside(self) -> str:
        """Return the folder of entries that were set aside.

        Raises:
            CacheError: It is a link, which may lead out of this folder.
        """
        folder = f"{self._root}/{BROKEN}"
        if self.is_local and Path(folder).is_symlink():
            raise CacheError(f"{self._shown}/{BROKEN} must be a folder; it is a link. Remove it.")
        return folder

    @contextmanager
    def _failing(self, problem: str, path: str, hint: str = "") -> Iterator[None]:
        try:
            yield
        except CacheError:
            raise
        except Exception as error:  # error types differ between file systems
            raise CacheError(f"{path} {problem}: {type(error).__name__}: {error}.{hint}") from error

    def _stream(self, name: str, stack: ExitStack) -> BinaryIO | None:
        """Open an entry's file until the stack closes; return None if it does not exist."""
        path = f"{self._root}/{name}{SUFFIX}"
        try:
            if not self.is_local:
                return cast(BinaryIO, stack.enter_context(self._fs.open(path, "rb")))
            if stat.S_ISREG(os.lstat(path).st_mode):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                return stack.enter_context(os.fdopen(descriptor, "rb"))
        except FileNotFoundError:
            return None
        raise BrokenEntryError(self.path_of(name), "it must be a regular file; it is a link, a folder or a device")

    def _has(self, path: str) -> bool:
        """Look an object up; unlike fsspec's `exists`, do not take a failure for its absence."""
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _new_file(self, name: str) -> Iterator[tuple[IO[bytes], str]]:
        """Create a file for a new entry; it is removed unless it was renamed. On a local disk, it is locked."""
        if not self.is_local:
            with tempfile.NamedTemporaryFile(prefix="rl-entry-") as file:
                yield file.file, file.name
            return
        Path(self._root).mkdir(parents=True, exist_ok=True)
        stream, path = _locked_file(f"{self._root}/{WRITING}{name}")
        with stream:
            try:
                yield stream, str(path)
            finally:
                path.unlink(missing_ok=True)


def _place(path: Path, target: Path, *, replace: bool) -> bool:
    """Give a complete file its name; return False if another file has it and stays."""
    if not replace:
        try:
            target.hardlink_to(path)  # of two writers at once, the first one's file stays
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                return False
        else:
            return True
    path.replace(target)
    return True


def _locked_file(prefix: str) -> tuple[BinaryIO, Path]:
    """Create and lock a file of a new name; another process may remove it before it is locked."""
    while True:
        path = Path(f"{prefix}-{secrets.token_hex(8)}")
        stream = path.open("xb")
        fcntl.flock(stream, fcntl.LOCK_EX)
        if path.exists():
            return stream, path
        stream.close()


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Lock a writer's file while the context is open.

    Raises:
        OSError: Its writer is alive, or it does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
