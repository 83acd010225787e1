"""Entries of arrays in a folder or at a URL: each is one zip of zarr arrays (format 3), complete or absent.

A writer fills a file of another name, flushes it and renames it; an object store gets whole objects. Entries may come
from strangers, so a reader compares the zip's directory, all sizes and every array's `zarr.json` with what the writer
here makes before zarr opens an array. Therefore no other codec, dtype or path is possible, and no allocation exceeds
what the bytes of the file justify. Needs the extra `zarr`.
"""

import fcntl
import io
import json
import math
import os
import secrets
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_core.data.records import Json
from rl_core.errors import BrokenEntryError, CacheError, MissingExtraError
from rl_core.files.durable import sync_folder
from rl_core.files.plain_files import count_values, load_json, preview

SUFFIX = ".zarr.zip"
BROKEN = "broken"
WRITING = ".writing-"
METADATA = "zarr.json"
MAX_CHUNK_BYTES = 1 << 24
MAX_ARRAY_METADATA_BYTES, MAX_ARRAY_METADATA_VALUES = 1 << 14, 1 << 8
MAX_DESCRIPTION_BYTES = 1 << 24
MAX_DESCRIPTION_VALUES = 1 << 19
MAX_DIRECTORY_BYTES = 1 << 21
"""Room for about 30,000 files; the library needs 1 KB of memory for each."""
MAX_RATIO = 256
"""Maximum compression ratio; lz4 expands one byte to at most 255."""
CRC_BYTES = 4
STRANGE = (zipfile.BadZipFile, EOFError, ValueError, KeyError, NotImplementedError, RecursionError, struct.error)
"""Errors of the library for zips, and of JSON, about content that is not as expected."""
BLOSC_HEADER = struct.Struct("<BBBBIII")
"""Version, codec version, flags, item size, and the sizes in bytes of the content, a block and the whole chunk."""
BLOSC_VERSION = 2
BLOSC_LZ4, BLOSC_FREE_FLAGS = 0x20, 0x16
"""The codec's bits of the flags, and the flags that depend on the content (copied, shuffled, not split)."""
NUM_THREADS = 4
MAX_SHOWN = 240
ZIP_END, ZIP64_END, ZIP64_LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"


class _ArraySpec(NamedTuple):
    """What an array's `zarr.json` may choose."""

    dtype: np.dtype[Any]
    length: int
    chunk_length: int
    is_compressed: bool

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_length * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.length * self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        return -(-self.length // self.chunk_length)


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
        with self._failing("looked up", self._shown):
            return bool(self._fs.isdir(self._root))

    def names(self) -> list[str]:
        """Return the names of all entries, including broken ones, sorted."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every entry by name."""
        return self._sizes(self._root)

    def others(self) -> list[str]:
        """Return the names of all other files and folders, such as entries of an earlier format."""
        with self._failing("listed", self._shown), suppress(FileNotFoundError):
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
        root = Path(self._root)
        if not self.is_local:
            return
        if root.exists() and not root.is_dir():
            raise CacheError(f"{self._shown} must be an existing or new folder; it is a file.")
        above = next(path for path in (root, *root.parents) if path.exists())
        if not above.is_dir() or (above != root and not os.access(above, os.W_OK | os.X_OK)):
            raise CacheError(f"{self._shown} cannot be created: {above} is not a folder that this user can write.")

    @contextmanager
    def open(self, name: str) -> Iterator["Entry | None"]:
        """Open an entry; yield None if it does not exist. It stays readable if it is replaced or removed meanwhile.

        Raises:
            BrokenEntryError: It is not an entry that `write` made.
            CacheError: The store cannot be read.
        """
        path = f"{self._root}/{name}{SUFFIX}"
        with ExitStack() as stack:
            stack.enter_context(self._failing("read", self.path_of(name)))
            stream = self._open_local(path, self.path_of(name)) if self.is_local else self._open_remote(path)
            entry = None
            if stream is not None:
                stack.enter_context(stream)
                entry = Entry(stream, path=self.path_of(name), max_bytes=self._max_entry_bytes)
            yield entry

    def write(
        self,
        name: str,
        description: Mapping[str, Json],
        arrays: Iterable[tuple[str, NDArray[Any]]],
        *,
        compress: bool = True,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        replace: bool = False,
        max_bytes: int | None = None,
    ) -> int | None:
        """Store an entry. A crash at any point leaves the earlier one, the new one, or none.

        Args:
            name: Name of the entry.
            description: JSON to store with the arrays.
            arrays: 1-D arrays with their names; each is stored before the next is requested.
            compress: Compress the arrays with lz4.
            chunk_bytes: Maximum bytes of an array that are read at once.
            replace: Replace an existing entry.
            max_bytes: Maximum size of the entry's file; None sets no limit.

        Returns:
            Size of the entry in bytes; None if another entry of this name was there first and stays.

        Raises:
            EntryTooLargeError: The file exceeds `max_bytes`; no part of it remains.
            CacheError: The entry cannot be stored, or its arrays are too large; no part of it remains.
        """
        target, shown = f"{self._root}/{name}{SUFFIX}", self.path_of(name)
        try:
            with self._new_file(name) as (stream, path):
                size = self._write_zip(stream, description, arrays, compress=compress, chunk_bytes=chunk_bytes)
                if max_bytes is not None and size > max_bytes:
                    raise EntryTooLargeError(f"{name} would exceed max_bytes = {max_bytes}; it was not stored.")
                if self.is_local:
                    if not _place(Path(path), Path(target), replace=replace):
                        return None
                    sync_folder(self._root)
                elif replace or not self._has(target):
                    self._fs.put_file(path, target)
                else:
                    return None
                return size
        except CacheError:
            raise
        except Exception as error:  # error types differ between file systems
            raise CacheError(
                f"{shown} could not be stored: {type(error).__name__}: {error}. Make room, or choose another folder."
            ) from error

    def remove(self, name: str) -> None:
        """Remove an entry; `broken/NAME` removes one that was set aside."""
        with self._failing("removed", self.path_of(name)), suppress(FileNotFoundError):
            path = f"{self._root}/{name}{SUFFIX}"
            if self.is_local and Path(path).is_dir() and not Path(path).is_symlink():
                shutil.rmtree(path)  # a folder in the place of an entry
            else:
                self._fs.rm_file(path)

    def set_aside(self, name: str) -> str | None:
        """Move an entry into `broken`; return its new path, or None if it does not exist."""
        aside = f"{BROKEN}/{name}-{secrets.token_hex(8)}"
        source, target = (f"{self._root}/{each}{SUFFIX}" for each in (name, aside))
        with self._failing("moved into broken", self.path_of(name)):
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
                found[path.name] = os.fstat(descriptor).st_size
        return found

    def remove_leftover(self, name: str) -> None:
        """Remove a leftover, unless it has been removed since."""
        path = Path(self._root, name)
        with suppress(OSError), _locked(path):
            path.unlink(missing_ok=True)

    # -- internal

    def _sizes(self, folder: str) -> dict[str, int]:
        with self._failing("listed", self._shown):
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
    def _failing(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except CacheError:
            raise
        except Exception as error:  # error types differ between file systems
            raise CacheError(f"{path} cannot be {what}: {type(error).__name__}: {error}.") from error

    def _open_local(self, path: str, shown: str) -> BinaryIO | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BrokenEntryError(shown, f"it must be a readable plain file: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BrokenEntryError(shown, "it must be a plain file; it is a folder, a pipe or a device")
        return os.fdopen(descriptor, "rb")

    def _open_remote(self, path: str) -> BinaryIO | None:
        try:
            stream: BinaryIO = self._fs.open(path, "rb")
        except FileNotFoundError:
            return None
        return stream

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

    def _write_zip(
        self,
        stream: IO[bytes],
        description: Mapping[str, Json],
        arrays: Iterable[tuple[str, NDArray[Any]]],
        *,
        compress: bool,
        chunk_bytes: int,
    ) -> int:
        total = 0
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays:
                total += array.nbytes
                if total > self._max_entry_bytes:
                    raise CacheError(
                        f"an entry's arrays need {total} bytes or more; at most {self._max_entry_bytes} are allowed."
                    )
                for file, content in _encode(name, array, compress=compress, chunk_bytes=chunk_bytes):
                    archive.writestr(_member(file), content)
            raw = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": dict(description)}).encode()
            if len(raw) > MAX_DESCRIPTION_BYTES or count_values(raw) > MAX_DESCRIPTION_VALUES:
                raise CacheError(
                    f"an entry's description has {len(raw)} bytes and up to {count_values(raw)} values; at most "
                    f"{MAX_DESCRIPTION_BYTES} bytes and {MAX_DESCRIPTION_VALUES} values are allowed."
                )
            archive.writestr(_member(METADATA), raw)
        stream.flush()
        os.fsync(stream.fileno())
        return stream.tell()


class Entry:
    """An open entry.

    Attributes:
        path: Its path or URL.
        size_bytes: Size of its file.
        description: The JSON that was stored with the arrays; not checked further.
    """

    def __init__(self, stream: BinaryIO, *, path: str, max_bytes: int) -> None:
        """Read the zip's directory and the description. Use `EntryFolder.open`."""
        self.path, self.size_bytes = path, stream.seek(0, io.SEEK_END)
        self._max_bytes = max_bytes
        with self._broken("is not a zip that this package wrote"):
            _check_directory(stream, self.size_bytes)
            self._zip = zipfile.ZipFile(stream)
            members = self._zip.infolist()
            self._members = {member.filename: member for member in members}
            is_plain = all(
                member.compress_type == zipfile.ZIP_STORED
                and member.file_size == member.compress_size
                and not member.flag_bits & 1
                for member in members
            )
            if not is_plain or len(members) != len(self._members):
                raise ValueError("its members must be stored once, neither compressed nor encrypted")
            is_inside = all(0 <= member.header_offset <= self.size_bytes for member in members)
            if not is_inside or sum(member.file_size for member in members) > self.size_bytes:
                raise ValueError("its members must lie in the file")
        root = self._json(METADATA, MAX_DESCRIPTION_BYTES, MAX_DESCRIPTION_VALUES)
        self.description = root.pop("attributes", None)
        if root != {"zarr_format": 3, "node_type": "group"} or not isinstance(self.description, dict):
            raise BrokenEntryError(f"{path}/{METADATA}", "it must describe a zarr group with attributes")

    def read(self, dtypes: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Read all arrays and check every byte.

        Args:
            dtypes: numpy name of the dtype of each array that may occur.

        Raises:
            BrokenEntryError: The entry has other files or arrays, or is damaged.
        """
        names = sorted({name.partition("/")[0] for name in self._members} - {METADATA})
        specs = {name: self._spec(name, dtypes) for name in names}
        expected = {METADATA, *(file for name, spec in specs.items() for file in _files(name, spec))}
        if differing := sorted(expected ^ self._members.keys()):
            is_missing = differing[0] in expected
            raise BrokenEntryError(
                f"{self.path}/{preview(differing[0])[1:-1]}", "it is missing" if is_missing else "it must not exist"
            )
        total = sum(spec.num_bytes for spec in specs.values())
        if total > self._max_bytes:
            raise BrokenEntryError(self.path, f"its arrays need {total} bytes; the limit is {self._max_bytes}")
        with ThreadPoolExecutor(NUM_THREADS, "entry") as threads:
            return dict(zip(specs, threads.map(self._array, specs, specs.values()), strict=True))

    def part(self, name: str, dtype: str, start: int, stop: int) -> NDArray[Any]:
        """Read the values [start, stop) of an array, and no chunk without them.

        Raises:
            BrokenEntryError: The array is missing, too short or damaged.
        """
        spec = self._spec(name, {name: dtype})
        if not 0 <= start <= stop <= spec.length:
            raise BrokenEntryError(f"{self.path}/{name}", f"it must have {stop} values; found {spec.length}")
        return self._array(name, spec, start, stop)

    def length(self, name: str, dtype: str) -> int:
        """Return the number of values of an array."""
        return self._spec(name, {name: dtype}).length

    def _spec(self, name: str, dtypes: Mapping[str, str]) -> _ArraySpec:
        """Return an array's form, after checking that its `zarr.json` is the one that `write` makes for it."""
        where = f"{self.path}/{preview(name)[1:-1]}"
        if name not in dtypes:
            raise BrokenEntryError(where, f"the arrays of such an entry are {', '.join(dtypes)}")
        found = self._json(f"{name}/{METADATA}", MAX_ARRAY_METADATA_BYTES, MAX_ARRAY_METADATA_VALUES)
        try:
            (length,), (chunk_length,) = found["shape"], found["chunk_grid"]["configuration"]["chunk_shape"]
            spec = _ArraySpec(np.dtype(dtypes[name]), length, chunk_length, len(found["codecs"]) > 2)
            is_possible = type(length) is int and type(chunk_length) is int and length >= 0 < chunk_length
        except (KeyError, TypeError, ValueError):
            raise BrokenEntryError(f"{where}/{METADATA}", "it must describe a zarr array with one axis") from None
        if not is_possible or spec.chunk_bytes > MAX_CHUNK_BYTES + 8:
            raise BrokenEntryError(
                f"{where}/{METADATA}",
                f"its shape is {preview(found['shape'])} in chunks of {preview(chunk_length)}; expected chunks of at "
                f"most {MAX_CHUNK_BYTES} bytes",
            )
        if spec.num_chunks >= len(self._members) or spec.num_bytes > self._max_bytes:
            raise BrokenEntryError(
                where,
                f"it needs {spec.num_bytes} bytes in {spec.num_chunks} chunks; the limit is {self._max_bytes} bytes, "
                f"and the entry has {len(self._members)} files",
            )
        expected = _metadata(spec)
        for key in dict.fromkeys([*expected, *found]):
            if key not in expected or key not in found or _text(found[key]) != _text(expected[key]):
                wanted = _text(expected[key]) if key in expected else "absent"
                raise BrokenEntryError(
                    f"{where}/{METADATA}", f"{preview(key)[1:-1]} must be {wanted}; found {preview(found.get(key))}"
                )
        return spec

    def _array(self, name: str, spec: _ArraySpec, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        import zarr
        from zarr.core.buffer import cpu
        from zarr.storage import MemoryStore

        stop = spec.length if stop is None else stop
        chunks = range(start // spec.chunk_length, -(-stop // spec.chunk_length)) if start < stop else range(0)
        contents = {f"{name}/{METADATA}": self._content(f"{name}/{METADATA}", MAX_ARRAY_METADATA_BYTES)}
        for file in (f"{name}/c/{index}" for index in chunks):
            contents[file] = self._content(file, spec.chunk_bytes + BLOSC_HEADER.size + CRC_BYTES)
            _check_chunk(contents[file], spec, path=f"{self.path}/{file}")
        store = MemoryStore({file: cpu.Buffer.from_bytes(content) for file, content in contents.items()})
        try:
            values: NDArray[Any] = zarr.open_array(store, path=name, mode="r")[start:stop]
        except Exception as error:  # zarr and its codecs raise many types
            raise BrokenEntryError(f"{self.path}/{name}", f"it cannot be decoded ({_described(error)})") from None
        return values

    def _json(self, file: str, max_bytes: int, max_values: int) -> dict[str, Any]:
        content = self._content(file, max_bytes)
        with self._broken(f"has a file {file} that is not a JSON object"):
            found = load_json(content, max_values=max_values)
            if not isinstance(found, dict):
                raise ValueError(preview(found))
        return found

    def _content(self, file: str, max_bytes: int) -> bytes:
        """Return a member after its checksum was compared."""
        where = f"{self.path}/{preview(file)[1:-1]}"
        member = self._members.get(file)
        if member is None:
            raise BrokenEntryError(where, "it is missing")
        if member.file_size > max_bytes:
            raise BrokenEntryError(where, f"it has {member.file_size} bytes; expected at most {max_bytes}")
        with self._broken(f"has a damaged file {file}"):
            return self._zip.read(member)

    @contextmanager
    def _broken(self, problem: str) -> Iterator[None]:
        """Name the entry in an error about its content."""
        try:
            yield
        except STRANGE as error:
            raise BrokenEntryError(self.path, f"it {problem} ({_described(error)})") from None


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


def _create(store: Any, name: str, spec: _ArraySpec) -> Any:
    """Create an array in a zarr store; its `zarr.json` is the only one that is read."""
    import zarr
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec

    itemsize = spec.dtype.itemsize
    blosc = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=itemsize)
    return zarr.create_array(
        store,
        name=name,
        shape=(spec.length,),
        dtype=spec.dtype,
        chunks=(spec.chunk_length,),
        filters=None,
        serializer=BytesCodec(endian="little" if itemsize > 1 else None),
        compressors=[*([blosc] if spec.is_compressed else []), Crc32cCodec()],
        config={"write_empty_chunks": True},
    )


@lru_cache(maxsize=64)
def _metadata(spec: _ArraySpec) -> dict[str, Json]:
    """Return the contents of an array's `zarr.json`."""
    from zarr.storage import MemoryStore

    store = MemoryStore()
    _create(store, "array", spec)
    found: dict[str, Json] = json.loads(store._store_dict[f"array/{METADATA}"].to_bytes())
    return found


def _encode(name: str, array: NDArray[Any], *, compress: bool, chunk_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an array, as zarr makes them; all-zero chunks too."""
    from zarr.storage import MemoryStore

    num_chunks = max(1, math.ceil(array.nbytes / min(chunk_bytes, MAX_CHUNK_BYTES)))
    chunk_length = max(1, math.ceil(len(array) / num_chunks))
    store = MemoryStore()
    _create(store, name, _ArraySpec(array.dtype, len(array), chunk_length, compress))[:] = array
    for file, content in sorted(store._store_dict.items()):  # zarr's threads store them in any order
        if file != METADATA:  # of the group above
            yield file, content.to_bytes()


def _files(name: str, spec: _ArraySpec) -> list[str]:
    return [f"{name}/{METADATA}", *(f"{name}/c/{index}" for index in range(spec.num_chunks))]


def _member(file: str) -> zipfile.ZipInfo:
    """Name of a file in the zip, without a time, so that equal arrays make equal files."""
    return zipfile.ZipInfo(file)


def _check_directory(stream: BinaryIO, size: int) -> None:
    """Check that a zip ends with a directory of limited size, which is loaded as a whole."""
    stream.seek(max(0, size - 98))
    end = stream.read(98)
    if end[-22:-18] != ZIP_END or end[-2:] != b"\0\0":
        raise ValueError("it has no directory at its end")
    (num_bytes,) = struct.unpack("<I", end[-10:-6])
    if end[-42:-38] == ZIP64_LOCATOR:
        (place,) = struct.unpack("<Q", end[-34:-26])  # zipfile may look there instead of in front of the locator
        if end[:4] != ZIP64_END or place != size - 98:
            raise ValueError("it has no directory at its end")
        (num_bytes,) = struct.unpack("<Q", end[40:48])
    if num_bytes > MAX_DIRECTORY_BYTES:
        raise ValueError(f"its directory has {num_bytes} bytes; expected at most {MAX_DIRECTORY_BYTES}")


def _check_chunk(content: bytes, spec: _ArraySpec, *, path: str) -> None:
    """Check that a chunk decodes to a chunk of this array. The library for blosc trusts the sizes in its header."""
    body, expected = content[:-CRC_BYTES], (spec.dtype.itemsize, spec.chunk_bytes, len(content) - CRC_BYTES)
    if not spec.is_compressed:
        if len(body) != spec.chunk_bytes:
            raise BrokenEntryError(path, f"it must have {spec.chunk_bytes} bytes of values; found {len(body)}")
        return
    if len(body) < BLOSC_HEADER.size:
        raise BrokenEntryError(path, f"it has {len(body)} bytes, too few for a compressed chunk")
    version, _, flags, typesize, num_bytes, block_bytes, stored = BLOSC_HEADER.unpack_from(body)
    if version != BLOSC_VERSION or flags & ~BLOSC_FREE_FLAGS != BLOSC_LZ4:
        raise BrokenEntryError(path, f"it must be compressed by lz4; found version {version}, flags {flags:#x}")
    is_possible = 0 < block_bytes <= num_bytes <= len(body) * MAX_RATIO
    if (typesize, num_bytes, stored) != expected or not is_possible:
        raise BrokenEntryError(
            path,
            f"its header declares {num_bytes} bytes in items of {typesize}, stored in {stored}; expected "
            f"{expected[1]} in items of {expected[0]}, stored in {expected[2]}",
        )


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {preview(str(error), most=MAX_SHOWN)[1:-1]}"


def _text(value: Json) -> str:
    """Return JSON as text, in which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


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
