"""Entries on an object store, through fsspec. Only this file imports fsspec.

An object store cannot rename, has no folders, and only writes single objects atomically. Each writer therefore puts its
arrays under a unique name, and the manifest with that name last: a reader sees one writer's complete entry or none.
Arrays that no manifest names belong to a dead writer or to one still at work. They count as leftovers once nothing
was added to them for `LEFT_AFTER_S`.
"""

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import fsspec

from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_rollout.skip.manifest import ARRAYS_FOLDER, MANIFEST, MAX_MANIFEST_BYTES, TOKEN_BYTES, EntryKey

BROKEN = "broken"
PATTERN = re.compile(r"[*?\[]")
"""Characters that make fsspec treat a path as a pattern, even when deleting."""
LEFT_AFTER_S = 3600.0


class RemoteFolder:
    """Entries below a URL."""

    def __init__(self, url: str) -> None:
        """Open the file system of the URL.

        Raises:
            CacheError: fsspec does not support the URL, or it is a pattern.
            MissingExtraError: The URL needs a package that is not installed.
        """
        if PATTERN.search(url):
            raise CacheError(f"{url} cannot be used for a skip cache: it must not contain * ? [. Give another URL.")
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtraError(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise CacheError(f"{url} cannot be used for a skip cache: {error}. Give a folder or a URL.") from error
        self._url = url.rstrip("/")
        self._root = _RemoteTree(self._fs, root.rstrip("/"), self._url)

    def path_of(self, name: str) -> str:
        """Return an entry's URL."""
        return f"{self._url}/{name}"

    def exists(self) -> bool:
        """Return True if there is any object below the URL."""
        return bool(self._root.objects())

    def names(self) -> list[str]:
        """Return the names of all entries with a manifest, including broken ones."""
        found = (path.partition("/") for path in self._root.objects())
        return sorted(name for name, _, rest in found if rest == MANIFEST and EntryKey.parse(name) is not None)

    @contextmanager
    def open(self, name: str) -> Iterator["RemoteFiles | None"]:
        """Open an entry's files; yield None if it has no manifest."""
        tree = self._tree(name)
        yield RemoteFiles(tree) if tree.has(MANIFEST) else None

    @contextmanager
    def begin(self, name: str) -> Iterator["RemoteWriter"]:
        """Create a new entry; its arrays are removed unless it is published."""
        writer = RemoteWriter(self._tree(name))
        try:
            yield writer
        finally:
            writer.discard()

    def remove(self, name: str) -> None:
        """Remove the manifest, which hides the entry from all readers, then the arrays that it names.

        Other arrays are kept, as their writer may still be at work. A manifest that names no arrays removes all.
        """
        tree = self._tree(name)
        found = tree.objects()
        arrays = _named_arrays(tree)
        tree.remove(MANIFEST)
        for path in found:
            if path != MANIFEST and (arrays is None or path.startswith(f"{arrays}/")):
                tree.remove(path)
        tree.remove_empty()

    def set_aside(self, name: str) -> str | None:
        """Copy an entry into `broken` and remove it; return its new URL, or None if it does not exist."""
        tree, target = self._tree(name), self._tree(f"{BROKEN}/{name}-{secrets.token_hex(TOKEN_BYTES)}")
        found = tree.objects()
        if MANIFEST not in found:
            return None
        for path in found:
            tree.copy(path, target)
        self.remove(name)
        return target.url

    def set_aside_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each item in `broken`."""
        sizes: dict[str, int] = {}
        for path, size in self._tree(BROKEN).objects().items():
            name = path.partition("/")[0]
            sizes[name] = sizes.get(name, 0) + (size or 0)
        return dict(sorted(sizes.items()))

    def remove_set_aside(self, name: str) -> None:
        """Remove an item from `broken`."""
        self._tree(f"{BROKEN}/{name}").remove_all()

    def check(self) -> None:
        """Do nothing: the store is not contacted before its first use."""

    def prepare(self) -> None:
        """Do nothing: the first entry creates the prefix, and dead writers are recognized only after LEFT_AFTER_S."""

    def leftovers(self) -> dict[str, int]:
        """Return the size in bytes of each folder of arrays left by a dead writer, by its path below the URL."""
        sizes: dict[str, int] = {}
        for path, size in self._root.objects().items():
            name, _, rest = path.partition("/")
            folder = rest.partition("/")[0]
            if EntryKey.parse(name) is not None and ARRAYS_FOLDER.fullmatch(folder):
                sizes[f"{name}/{folder}"] = sizes.get(f"{name}/{folder}", 0) + (size or 0)
        return {path: size for path, size in sorted(sizes.items()) if self._is_left(path)}

    def remove_leftover(self, name: str) -> None:
        """Remove a folder of arrays, if it is still a leftover."""
        if self._is_left(name):
            self._tree(name).remove_all()

    def _is_left(self, path: str) -> bool:
        """Return True if the arrays are old and belong to no entry. A broken manifest counts as naming all arrays."""
        name, _, arrays = path.partition("/")
        entry = self._tree(name)
        try:
            newest = self._tree(path).newest()
            if newest is None or time.time() - newest <= LEFT_AFTER_S:
                return False
            return not entry.has(MANIFEST) or _named_arrays(entry) not in (None, arrays)
        except CacheError:  # unreadable now, so not known to be a leftover
            return False

    def _tree(self, path: str) -> "_RemoteTree":
        return _RemoteTree(self._fs, f"{self._root.path}/{path}", f"{self._url}/{path}")


class RemoteFiles:
    """Files of one entry."""

    def __init__(self, tree: "_RemoteTree") -> None:
        """Set the entry's objects."""
        self._tree = tree
        self._manifest: bytes | None = None

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file, by its path relative to the entry."""
        found = self._tree.objects()
        for path, size in found.items():
            if size is None:
                raise BrokenEntryError(f"{self._tree.url}/{path}", "it must be a plain file of a known size")
        return {path: size for path, size in found.items() if size is not None}

    def read(self, path: str, size_bytes: int) -> memoryview:
        """Read a complete file into writable memory."""
        where = f"{self._tree.url}/{path}"
        content = self._tree.read(path, size_bytes + 1)
        if content is None:
            raise BrokenEntryError(where, "it is missing")
        if len(content) != size_bytes:
            more = " or more" if len(content) > size_bytes else ""
            raise BrokenEntryError(where, f"it must have {size_bytes} bytes; found {len(content)}{more}")
        if path == MANIFEST:
            self._manifest = content
        return memoryview(bytearray(content))

    def is_current(self) -> bool:
        """Return True while the manifest that was read is still in place."""
        return self._manifest is None or self._tree.read(MANIFEST, len(self._manifest) + 1) == self._manifest


class RemoteWriter:
    """Writer of one entry."""

    def __init__(self, tree: "_RemoteTree") -> None:
        """Set the entry's objects."""
        self._tree = tree
        self._written: list[str] = []

    def write(self, path: str, *parts: bytes | memoryview) -> None:
        """Write a file from parts."""
        self._written.append(path)
        self._tree.put(path, b"".join(parts))

    def publish(self, manifest: bytes, *, replace: bool) -> bool:
        """Write the manifest; with `replace`, remove the replaced arrays.

        Returns:
            False if another entry was there first and stays.
        """
        if not replace and not self._tree.put_new(MANIFEST, manifest):
            return False
        replaced = _named_arrays(self._tree) if replace else None
        if replace:
            self._tree.put(MANIFEST, manifest)
        self._written.clear()
        if replaced is not None:
            self._tree.below(replaced).remove_all()
        return True

    def discard(self) -> None:
        """Remove the files of an unpublished entry; `prune` removes any that the store fails to delete here."""
        for path in self._written:
            with contextlib.suppress(CacheError):
                self._tree.remove(path)
        self._written.clear()


class _RemoteTree:
    """All objects below one path. Every failure of the store is raised as a CacheError."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs = fs
        self.path = path
        self.url = url

    def below(self, name: str) -> "_RemoteTree":
        return _RemoteTree(self._fs, f"{self.path}/{name}", f"{self.url}/{name}")

    def objects(self) -> dict[str, int | None]:
        """Return the size of every object by its relative path; None for a link or an unknown size."""
        with self._failing("listed"):
            found = self._fs.find(self.path, detail=True)
        stem = f"{self.path}/"
        return {
            path.removeprefix(stem): _size_of(each)
            for path, each in sorted(found.items())
            # Some stores keep an empty object per folder, and include the requested path itself.
            if path.startswith(stem) and not path.endswith("/") and each.get("type") != "directory"
        }

    def has(self, name: str) -> bool:
        with self._failing("looked up", name):
            try:
                return bool(self._fs.info(f"{self.path}/{name}")["type"] != "directory")
            except FileNotFoundError:
                return False

    def read(self, name: str, max_bytes: int) -> bytes | None:
        with self._failing("read", name):
            try:
                content: bytes = self._fs.cat_file(f"{self.path}/{name}", start=0, end=max_bytes)
            except FileNotFoundError:
                return None
            return content

    def put(self, name: str, content: bytes) -> None:
        path = f"{self.path}/{name}"
        with self._failing("stored", name):
            try:
                self._fs.pipe_file(path, content)
            except FileNotFoundError:  # a store with real folders
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(path, content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write an object unless it exists; return False if another does. Atomic on stores with exclusive creation."""
        if self.has(name):
            return False
        try:
            self._fs.pipe_file(f"{self.path}/{name}", content, mode="create")
        except Exception:  # the object exists, or the store has no exclusive creation; the error depends on the store
            if self.has(name):
                # A retried write finds its own object.
                return self.read(name, len(content) + 1) == content
            self.put(name, content)
        return True

    def copy(self, name: str, target: "_RemoteTree") -> None:
        with self._failing("copied", name), contextlib.suppress(FileNotFoundError):
            path = f"{target.path}/{name}"
            try:
                self._fs.cp_file(f"{self.path}/{name}", path)
            except FileNotFoundError:  # it was removed, or a folder must be created first
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.cp_file(f"{self.path}/{name}", path)

    def remove(self, name: str) -> None:
        with self._failing("removed", name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self.path}/{name}")

    def remove_all(self) -> None:
        for name in self.objects() if PATTERN.search(self.path) else ():
            self.remove(name)
        with self._failing("removed"), contextlib.suppress(FileNotFoundError):
            if not PATTERN.search(self.path):
                self._fs.rm(self.path, recursive=True)

    def remove_empty(self) -> None:
        """Remove the folder itself once it is empty, on stores with real folders."""
        if not self.objects():
            self.remove_all()

    def newest(self) -> float | None:
        """Return the newest modification time in seconds since the epoch; None if unknown or without objects."""
        times = []
        for name in self.objects():
            try:
                changed: object = self._fs.modified(f"{self.path}/{name}")
            except (FileNotFoundError, NotImplementedError):
                return None
            except Exception as error:  # error types differ between file systems
                raise self._failed("inspected", name, error) from error
            if not isinstance(changed, datetime):
                return None
            times.append((changed if changed.tzinfo else changed.replace(tzinfo=UTC)).timestamp())
        return max(times, default=None)

    @contextmanager
    def _failing(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # error types differ between file systems
            raise self._failed(what, name, error) from error

    def _failed(self, what: str, name: str, error: Exception) -> CacheError:
        where = f"{self.url}/{name}" if name else self.url
        return CacheError(f"{where} cannot be {what}: {type(error).__name__}: {error}.")


def _named_arrays(entry: _RemoteTree) -> str | None:
    """Return the folder of arrays that an entry's manifest names; None if there is no valid one."""
    try:
        raw = entry.read(MANIFEST, MAX_MANIFEST_BYTES)
        named = None if raw is None else json.loads(raw)["manifest"]["arrays_folder"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return named if isinstance(named, str) and ARRAYS_FOLDER.fullmatch(named) else None


def _size_of(found: dict[str, Any]) -> int | None:
    size = found.get("size")
    is_plain = found.get("type") == "file" and not found.get("islink")
    return int(size) if is_plain and isinstance(size, int) and size >= 0 else None
