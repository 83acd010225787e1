"""Entries on an object store, through fsspec; the one file that knows it.

An object store renames nothing, has no folders, and puts one object at a time whole. So each writer puts its arrays
under a name of its own, and the manifest, which says that name, last: a reader sees the entry of one writer or none.
What writers left that died is arrays that no manifest names; a writer that lives has such arrays too, and so they count
as left when nothing was put there for `LEFT_AFTER_S`.
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
"""fsspec takes a path with one of these for many paths, also when it removes."""
LEFT_AFTER_S = 3600.0


class RemoteFolder:
    """Entries below a URL."""

    def __init__(self, url: str) -> None:
        """Find the file system that knows the URL.

        Raises:
            CacheError: fsspec knows no such URL, or it is a pattern.
            MissingExtraError: It needs a package that is not installed.
        """
        if PATTERN.search(url):
            raise CacheError(f"{url} is no place for a skip cache: it must have none of * ? [. Give another URL.")
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtraError(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise CacheError(f"{url} is no place for a skip cache: {error}. Give a folder or a URL.") from error
        self._url = url.rstrip("/")
        self._root = _RemoteTree(self._fs, root.rstrip("/"), self._url)

    def path_of(self, name: str) -> str:
        """Where an entry is."""
        return f"{self._url}/{name}"

    def exists(self) -> bool:
        """True when anything is below the URL."""
        return bool(self._root.objects())

    def names(self) -> list[str]:
        """Names of what is, or claims to be, an entry; one without manifest is not there yet."""
        found = (path.partition("/") for path in self._root.objects())
        return sorted(name for name, _, rest in found if rest == MANIFEST and EntryKey.parse(name) is not None)

    @contextmanager
    def open(self, name: str) -> Iterator["RemoteFiles | None"]:
        """An entry's files."""
        tree = self._tree(name)
        yield RemoteFiles(tree) if tree.has(MANIFEST) else None

    @contextmanager
    def begin(self, name: str) -> Iterator["RemoteWriter"]:
        """A new entry; its arrays are removed where it is not published."""
        writer = RemoteWriter(self._tree(name))
        try:
            yield writer
        finally:
            writer.discard()

    def remove(self, name: str) -> None:
        """Remove the manifest, and with it the entry for all readers; then the arrays that it names.

        Arrays that it does not name may be of a writer that is at work. Those of a manifest that names none go.
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
        """Copy an entry below `broken`, and remove it."""
        tree, target = self._tree(name), self._tree(f"{BROKEN}/{name}-{secrets.token_hex(TOKEN_BYTES)}")
        found = tree.objects()
        if MANIFEST not in found:
            return None
        for path in found:
            tree.copy(path, target)
        self.remove(name)
        return target.url

    def set_aside_sizes(self) -> dict[str, int]:
        """Bytes of what was set aside."""
        sizes: dict[str, int] = {}
        for path, size in self._tree(BROKEN).objects().items():
            name = path.partition("/")[0]
            sizes[name] = sizes.get(name, 0) + (size or 0)
        return dict(sorted(sizes.items()))

    def remove_set_aside(self, name: str) -> None:
        """Remove what was set aside."""
        self._tree(f"{BROKEN}/{name}").remove_all()

    def check(self) -> None:
        """Nothing is asked of the store before it is used."""

    def prepare(self) -> None:
        """Nothing is made before the first entry, and a writer that died cannot be told at once from one that lives."""

    def leftovers(self) -> dict[str, int]:
        """Bytes of arrays that no manifest names, and to which nothing was added for LEFT_AFTER_S, by their path."""
        sizes: dict[str, int] = {}
        for path, size in self._root.objects().items():
            name, _, rest = path.partition("/")
            folder = rest.partition("/")[0]
            if EntryKey.parse(name) is not None and ARRAYS_FOLDER.fullmatch(folder):
                sizes[f"{name}/{folder}"] = sizes.get(f"{name}/{folder}", 0) + (size or 0)
        return {path: size for path, size in sorted(sizes.items()) if self._is_left(path)}

    def remove_leftover(self, name: str) -> None:
        """Remove arrays that no manifest names."""
        if self._is_left(name):
            self._tree(name).remove_all()

    def _is_left(self, path: str) -> bool:
        """True for arrays that are old and belong to no entry; a broken manifest may name any of them."""
        name, _, arrays = path.partition("/")
        entry = self._tree(name)
        try:
            newest = self._tree(path).newest()
            if newest is None or time.time() - newest <= LEFT_AFTER_S:
                return False
            return not entry.has(MANIFEST) or _named_arrays(entry) not in (None, arrays)
        except CacheError:  # what the store cannot give now is not known to be left
            return False

    def _tree(self, path: str) -> "_RemoteTree":
        return _RemoteTree(self._fs, f"{self._root.path}/{path}", f"{self._url}/{path}")


class RemoteFiles:
    """The files of one entry."""

    def __init__(self, tree: "_RemoteTree") -> None:
        """Name the entry."""
        self._tree = tree
        self._manifest: bytes | None = None

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by its path in the entry."""
        found = self._tree.objects()
        for path, size in found.items():
            if size is None:
                raise BrokenEntryError(f"{self._tree.url}/{path}", "it must be a plain file of a known size")
        return {path: size for path, size in found.items() if size is not None}

    def read(self, path: str, size_bytes: int) -> memoryview:
        """A whole file."""
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
        """True while the manifest that was read is still there."""
        return self._manifest is None or self._tree.read(MANIFEST, len(self._manifest) + 1) == self._manifest


class RemoteWriter:
    """An entry that is being put."""

    def __init__(self, tree: "_RemoteTree") -> None:
        """Name the entry."""
        self._tree = tree
        self._written: list[str] = []

    def write(self, path: str, *parts: bytes | memoryview) -> None:
        """Put a file."""
        self._written.append(path)
        self._tree.put(path, b"".join(parts))

    def publish(self, manifest: bytes, *, replace: bool) -> bool:
        """Put the manifest, unless there is one that stays; what it takes the place of is removed."""
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
        """Remove what was put and not published; where the store fails, it is left to `prune`."""
        for path in self._written:
            with contextlib.suppress(CacheError):
                self._tree.remove(path)
        self._written.clear()


class _RemoteTree:
    """All objects whose names begin with one path; every failure of the store becomes an error of ours."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs = fs
        self.path = path
        self.url = url

    def below(self, name: str) -> "_RemoteTree":
        return _RemoteTree(self._fs, f"{self.path}/{name}", f"{self.url}/{name}")

    def objects(self) -> dict[str, int | None]:
        """Bytes of every object by its path below this one; None of a link, and where the store does not say."""
        with self._failing("listed"):
            found = self._fs.find(self.path, detail=True)
        stem = f"{self.path}/"
        return {
            path.removeprefix(stem): _size_of(each)
            for path, each in sorted(found.items())
            # Some stores keep an empty object for a folder, and list what was asked for itself.
            if path.startswith(stem) and not path.endswith("/") and each.get("type") != "directory"
        }

    def has(self, name: str) -> bool:
        with self._failing("looked for", name):
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
            except FileNotFoundError:  # no object store, but one that has folders
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(path, content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Put an object where there is none; False where another is. Stores that can see to it themselves do so."""
        if self.has(name):
            return False
        try:
            self._fs.pipe_file(f"{self.path}/{name}", content, mode="create")
        except Exception:  # whichever way this store says that there is one, or that it cannot see to it
            if self.has(name):
                # A put that was sent twice finds itself.
                return self.read(name, len(content) + 1) == content
            self.put(name, content)
        return True

    def copy(self, name: str, target: "_RemoteTree") -> None:
        with self._failing("copied", name), contextlib.suppress(FileNotFoundError):
            path = f"{target.path}/{name}"
            try:
                self._fs.cp_file(f"{self.path}/{name}", path)
            except FileNotFoundError:  # it is gone, or a folder has to be made
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
        """Remove the folder itself, where the store has folders and nothing is in it any more."""
        if not self.objects():
            self.remove_all()

    def newest(self) -> float | None:
        """When the last object was put here, in seconds since the epoch; None where the store does not say."""
        times = []
        for name in self.objects():
            try:
                changed: object = self._fs.modified(f"{self.path}/{name}")
            except (FileNotFoundError, NotImplementedError):
                return None
            except Exception as error:  # each file system raises its own kinds
                raise self._failed("looked at", name, error) from error
            if not isinstance(changed, datetime):
                return None
            times.append((changed if changed.tzinfo else changed.replace(tzinfo=UTC)).timestamp())
        return max(times, default=None)

    @contextmanager
    def _failing(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system raises its own kinds
            raise self._failed(what, name, error) from error

    def _failed(self, what: str, name: str, error: Exception) -> CacheError:
        where = f"{self.url}/{name}" if name else self.url
        return CacheError(f"{where} cannot be {what}: {type(error).__name__}: {error}.")


def _named_arrays(entry: _RemoteTree) -> str | None:
    """The folder of arrays that an entry's manifest names; None without a manifest that names one."""
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
