"""Entries on an object store, through fsspec; the one file that knows it.

An object store renames nothing, and puts one object at a time whole. So each writer puts its arrays under a name of its
own, and the manifest, which says that name, last: a reader sees the entry of one writer or none. What writers left that
died is removed with the entry, by `prune`.
"""

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_rollout.skip.manifest import MANIFEST, TOKEN_BYTES, EntryKey

BROKEN = "broken"


class RemoteFolder:
    """Entries below a URL."""

    def __init__(self, url: str) -> None:
        """Find the file system that knows the URL.

        Raises:
            CacheError: fsspec knows no such URL.
            MissingExtraError: It needs a package that is not installed.
        """
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtraError(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise CacheError(f"{url} is no place for a skip cache: {error}. Give a folder or a URL.") from error
        self._root = self._root.rstrip("/")
        self._url = url.rstrip("/")

    def path_of(self, name: str) -> str:
        """Where an entry is."""
        return f"{self._url}/{name}"

    def names(self) -> list[str]:
        """Names of what is, or claims to be, an entry; one without manifest is not there yet."""
        return [name for name in self._below("") if EntryKey.parse(name) and self._fs.exists(self._manifest(name))]

    @contextmanager
    def open(self, name: str) -> Iterator["RemoteFiles | None"]:
        """An entry's files."""
        yield RemoteFiles(self._fs, f"{self._root}/{name}") if self._fs.exists(self._manifest(name)) else None

    @contextmanager
    def begin(self, name: str) -> Iterator["RemoteWriter"]:
        """A new entry; its arrays are removed where it is not published."""
        writer = RemoteWriter(self._fs, f"{self._root}/{name}")
        try:
            yield writer
        except OSError as error:
            raise CacheError(f"rollouts could not be stored as {self.path_of(name)}: {error}.") from error
        finally:
            writer.discard()

    def remove(self, name: str) -> None:
        """Remove the manifest, and with it the entry for all readers; then the rest."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._manifest(name))
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def set_aside(self, name: str) -> str | None:
        """Copy an entry below `broken`, and remove it."""
        target = f"{BROKEN}/{name}-{secrets.token_hex(TOKEN_BYTES)}"
        try:
            self._fs.copy(f"{self._root}/{name}", f"{self._root}/{target}", recursive=True)
        except FileNotFoundError:
            return None
        self.remove(name)
        return f"{self._url}/{target}"

    def set_aside_sizes(self) -> dict[str, int]:
        """Bytes of what was set aside."""
        return {name: int(self._fs.du(f"{self._root}/{BROKEN}/{name}")) for name in self._below(f"/{BROKEN}")}

    def remove_set_aside(self, name: str) -> None:
        """Remove what was set aside."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{BROKEN}/{name}", recursive=True)

    def prepare(self) -> None:
        """Nothing is made before the first entry."""

    def sweep(self) -> None:
        """Nothing: a writer that lives cannot be told from one that died."""

    def _manifest(self, name: str) -> str:
        return f"{self._root}/{name}/{MANIFEST}"

    def _below(self, folder: str) -> list[str]:
        try:
            found = self._fs.ls(f"{self._root}{folder}", detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # each file system raises its own kinds
            raise CacheError(f"{self._url} cannot be listed: {type(error).__name__}: {error}.") from error
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)


class RemoteFiles:
    """The files of one entry."""

    def __init__(self, fs: Any, path: str) -> None:
        """Name the entry."""
        self._fs = fs
        self._path = path

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by its path in the entry."""
        found = self._fs.find(self._path, detail=True)
        stem = len(self._path) + 1
        if any(each.get("islink") or each.get("type") != "file" for each in found.values()):
            raise BrokenEntryError(self._path, "it must have plain files alone; found a link or something else")
        return {path[stem:]: int(each["size"]) for path, each in found.items()}

    def read(self, path: str, size_bytes: int) -> bytes:
        """A whole file."""
        where = f"{self._path}/{path}"
        try:
            content: bytes = self._fs.cat_file(where, start=0, end=size_bytes + 1)
        except FileNotFoundError:
            raise BrokenEntryError(where, "it is missing") from None
        except Exception as error:  # each file system raises its own kinds
            raise BrokenEntryError(where, f"it cannot be read ({type(error).__name__}: {error})") from error
        if len(content) != size_bytes:
            raise BrokenEntryError(where, f"it must have {size_bytes} bytes; found {len(content)} or more")
        return content


class RemoteWriter:
    """An entry that is being put."""

    def __init__(self, fs: Any, path: str) -> None:
        """Name the entry."""
        self._fs = fs
        self._path = path
        self._written: list[str] = []

    def write(self, path: str, content: bytes) -> None:
        """Put a file."""
        self._fs.makedirs(f"{self._path}/{path}".rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(f"{self._path}/{path}", content)
        self._written.append(path)

    def publish(self, manifest: bytes, *, replace: bool) -> bool:
        """Put the manifest, unless there is one that stays."""
        if not replace and self._fs.exists(f"{self._path}/{MANIFEST}"):
            return False
        self._fs.pipe_file(f"{self._path}/{MANIFEST}", manifest)
        self._written.clear()
        return True

    def discard(self) -> None:
        """Remove what was put and not published."""
        for path in self._written:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{path}")
