"""One entry of arrays: a zip of zarr arrays (format 3), which is read as a stranger's.

The zip's directory, all sizes and every array's `zarr.json` are compared with what `write_entry` makes, before zarr
opens an array. Therefore no other codec, dtype or path is possible, and no allocation exceeds what the bytes of the
file justify. Needs the extra `zarr`.
"""

import io
import json
import math
import os
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_core.data.records import Json
from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files.plain_files import count_values, load_json, preview

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer

FORMAT = 2
METADATA = "zarr.json"
MAX_CHUNK_BYTES = 1 << 24
MAX_ARRAY_METADATA_BYTES, MAX_ARRAY_METADATA_VALUES = 1 << 14, 1 << 8
MAX_DESCRIPTION_BYTES, MAX_DESCRIPTION_VALUES = 1 << 24, 1 << 19
MAX_DIRECTORY_BYTES = 1 << 21
"""Room for about 30,000 files; the library needs 1 KB of memory for each."""
LOCAL_HEADER_BYTES = 30
"""Size of the header in front of a file in a zip, without the file's name."""
MAX_RATIO = 256
"""Maximum compression ratio; lz4 expands one byte to at most 255."""
BLOSC_HEADER = struct.Struct("<BBBBIII")
"""Version, codec version, flags, item size, and the sizes in bytes of the content, a block and the whole chunk."""
BLOSC_LZ4, BLOSC_FREE_FLAGS = 0x20, 0x16
"""The codec's bits of the flags, and the flags that depend on the content (copied, shuffled, not split)."""
CRC_BYTES = 4
STRANGE = (zipfile.BadZipFile, ValueError, NotImplementedError, RecursionError, struct.error)
"""Errors of the library for zips, and of JSON, about content that is not as expected."""
MAX_SHOWN = 240
MAX_PENDING = 4
"""Maximum number of chunks in memory that wait to be written, in another thread."""


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


class Entry:
    """An open entry of format FORMAT.

    Attributes:
        path: Its path or URL.
        size_bytes: Size of its file.
        description: The JSON that was stored with the arrays; not checked further.
    """

    def __init__(self, stream: BinaryIO, *, path: str, max_bytes: int) -> None:
        """Read the zip's directory and the description. Use `EntryFolder.open`."""
        self.path, self.size_bytes = path, stream.seek(0, io.SEEK_END)
        self._stream = stream
        self._max_bytes = min(max_bytes, MAX_RATIO * self.size_bytes)
        with self._broken("is not a zip that this package wrote"):
            members = zipfile.ZipFile(_DirectoryStream(stream)).infolist()
            self._members = {member.filename: member for member in members}
            total = sum(member.file_size for member in members)
            if len(members) != len(self._members) or total > self.size_bytes:
                raise ValueError("its files must be stored once, uncompressed")
        root = self._json(METADATA, MAX_DESCRIPTION_BYTES, MAX_DESCRIPTION_VALUES)
        self.description = root.pop("attributes", None)
        if root != {"zarr_format": 3, "node_type": "group"} or not isinstance(self.description, dict):
            raise BrokenEntryError(f"{path}/{METADATA}", "it must describe a zarr group with attributes")
        found = self.description.pop("format", None)
        if type(found) is int and found != FORMAT:
            raise CacheError(
                f"{path} has format {found}; this version reads format {FORMAT}. Use another directory, or the version "
                "that wrote it."
            )
        if found != FORMAT:
            raise BrokenEntryError(f"{path}/{METADATA}", f"its format must be a number; found {preview(found)}")

    def read(self, dtypes: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Read all arrays and check every byte.

        Args:
            dtypes: numpy name of the dtype of each array that may occur.

        Raises:
            BrokenEntryError: The entry has other files or arrays, or is damaged.
        """
        names = sorted({name.partition("/")[0] for name in self._members} - {METADATA})
        specs = {name: self._spec(name, dtypes) for name in names}
        expected = {METADATA, *(f"{name}/{METADATA}" for name in names)}
        expected |= {f"{name}/c/{index}" for name, spec in specs.items() for index in range(spec.num_chunks)}
        if differing := sorted(expected ^ self._members.keys()):
            problem = "it is missing" if differing[0] in expected else "it must not exist"
            raise BrokenEntryError(self._shown(differing[0]), problem)
        total = sum(spec.num_bytes for spec in specs.values())
        if total > self._max_bytes:
            raise BrokenEntryError(self.path, f"its arrays need {total} bytes; the limit is {self._max_bytes}")
        return {name: self._array(name, spec) for name, spec in specs.items()}

    def _spec(self, name: str, dtypes: Mapping[str, str]) -> _ArraySpec:
        """Return an array's form, after checking that its `zarr.json` is the one that `write_entry` makes for it."""
        if name not in dtypes:
            raise BrokenEntryError(self._shown(name), f"the arrays of such an entry are {', '.join(dtypes)}")
        file = f"{name}/{METADATA}"
        found = self._json(file, MAX_ARRAY_METADATA_BYTES, MAX_ARRAY_METADATA_VALUES)
        try:
            (length,), (chunk_length,) = found["shape"], found["chunk_grid"]["configuration"]["chunk_shape"]
            spec = _ArraySpec(np.dtype(dtypes[name]), length, chunk_length, len(found["codecs"]) > 2)
        except (KeyError, TypeError, ValueError):
            raise BrokenEntryError(self._shown(file), "it must describe a zarr array with one axis") from None
        is_possible = type(length) is int and type(chunk_length) is int and length >= 0 < chunk_length
        if not is_possible or spec.chunk_bytes > MAX_CHUNK_BYTES + 8:
            raise BrokenEntryError(
                self._shown(file),
                f"its shape is {preview(found['shape'])} in chunks of {preview(chunk_length)}; expected chunks of at "
                f"most {MAX_CHUNK_BYTES} bytes",
            )
        if spec.num_chunks >= len(self._members) or spec.num_bytes > self._max_bytes:
            raise BrokenEntryError(
                self._shown(name),
                f"it needs {spec.num_bytes} bytes in {spec.num_chunks} chunks; the limit is {self._max_bytes} bytes, "
                f"and the entry has {len(self._members)} files",
            )
        expected = _metadata(spec)
        for key in {**expected, **found} if _text(found) != _text(expected) else ():
            wanted, seen = (_text(each[key]) if key in each else "absent" for each in (expected, found))
            if wanted != seen:
                raise BrokenEntryError(
                    self._shown(file), f"{preview(key)[1:-1]} must be {wanted}; found {preview(seen)[1:-1]}"
                )
        return spec

    def _array(self, name: str, spec: _ArraySpec) -> NDArray[Any]:
        import zarr
        from zarr.core.buffer import cpu
        from zarr.storage import MemoryStore

        files = [f"{name}/c/{index}" for index in range(spec.num_chunks)]
        contents = {file: self._chunk(file, spec) for file in files}
        contents[f"{name}/{METADATA}"] = json.dumps(_metadata(spec)).encode()
        store = MemoryStore({file: cpu.Buffer.from_bytes(content) for file, content in contents.items()})
        try:
            values: NDArray[Any] = zarr.open_array(store, path=name, mode="r")[:]
        except Exception as error:  # zarr and its codecs raise many types
            raise BrokenEntryError(self._shown(name), f"{name} cannot be decoded ({_described(error)})") from None
        return values

    def _chunk(self, file: str, spec: _ArraySpec) -> bytes:
        """Return a chunk, after checking its header: the library for blosc trusts the sizes in it."""
        content = self._content(file, spec.chunk_bytes + BLOSC_HEADER.size + CRC_BYTES)
        if spec.is_compressed:
            header = BLOSC_HEADER.unpack(content[: BLOSC_HEADER.size].ljust(BLOSC_HEADER.size, b"\0"))
            version, _, flags, typesize, num_bytes, block_bytes, stored = header
            found = (version, flags & ~BLOSC_FREE_FLAGS, typesize, num_bytes, stored)
            itemsize, room = spec.dtype.itemsize, len(content) - CRC_BYTES
            if found != (2, BLOSC_LZ4, itemsize, spec.chunk_bytes, room) or not 0 < block_bytes <= num_bytes:
                raise BrokenEntryError(
                    self._shown(file),
                    f"its header declares {header}; expected version 2, lz4, and {spec.chunk_bytes} bytes in items of "
                    f"{itemsize}, stored in {room}",
                )
        return content

    def _json(self, file: str, max_bytes: int, max_values: int) -> dict[str, Any]:
        content = self._content(file, max_bytes)
        with self._broken(f"has a file {file} that is not a JSON object"):
            if zlib.crc32(content) != self._members[file].CRC:
                raise ValueError("its checksum differs")
            found = load_json(content, max_values=max_values)
            if not isinstance(found, dict):
                raise ValueError(preview(found))
        return found

    def _content(self, file: str, max_bytes: int) -> bytes:
        """Return the bytes of a file; its own checksum decides whether they are the right ones."""
        member = self._members.get(file)
        if member is None:
            raise BrokenEntryError(self._shown(file), "it is missing")
        if member.file_size > max_bytes:
            raise BrokenEntryError(self._shown(file), f"it has {member.file_size} bytes; expected at most {max_bytes}")
        with self._broken(f"has a damaged file {file}"):
            place = member.header_offset + LOCAL_HEADER_BYTES + len(file)
            if not 0 <= place <= self.size_bytes:
                raise ValueError("it must lie in the entry's file")
            self._stream.seek(place)
            return self._stream.read(member.file_size)

    def _shown(self, file: str) -> str:
        """Return the path of a file or array in an error message; strangers chose its name."""
        return f"{self.path}/{preview(file)[1:-1]}"

    @contextmanager
    def _broken(self, problem: str) -> Iterator[None]:
        """Name the entry in an error about its content."""
        try:
            yield
        except STRANGE as error:
            if isinstance(error.__context__, OSError):  # the library takes a failed read for a file that is no zip
                raise error.__context__ from None
            raise BrokenEntryError(self.path, f"it {problem} ({_described(error)})") from None


class _DirectoryStream:
    """A stream for the library for zips, which reads as many bytes at once as a zip declares for its directory."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek, self.tell, self._stream = stream.seek, stream.tell, stream

    def read(self, num_bytes: int = -1) -> bytes:
        if num_bytes > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {num_bytes} bytes; expected at most {MAX_DIRECTORY_BYTES}")
        return self._stream.read(num_bytes)


def write_entry(
    stream: IO[bytes],
    description: Mapping[str, Json],
    arrays: Iterable[tuple[str, NDArray[Any]]],
    *,
    compress: bool,
    max_bytes: int,
) -> int:
    """Write an entry, flush it to disk, and return its size in bytes.

    Args:
        stream: An empty file.
        description: JSON to store with the arrays.
        arrays: 1-D arrays with their names; each is stored before the next is requested.
        compress: Compress the arrays with lz4.
        max_bytes: Maximum memory of the arrays.

    Raises:
        CacheError: The arrays or the description are too large.
    """
    total, pending = 0, deque[Future[None]]()
    # The archive has no times: equal arrays make equal files.
    with zipfile.ZipFile(stream, "w") as archive, ThreadPoolExecutor(1, "entry") as writer:
        for name, array in arrays:
            total += array.nbytes
            if total > max_bytes:
                raise CacheError(f"an entry's arrays need {total} bytes or more; at most {max_bytes} are allowed.")
            for file, content in _encode(name, array, compress=compress):
                pending.append(writer.submit(archive.writestr, zipfile.ZipInfo(file), content))
                if len(pending) > MAX_PENDING:
                    pending.popleft().result()
        raw = json.dumps(
            {"zarr_format": 3, "node_type": "group", "attributes": {"format": FORMAT, **description}}
        ).encode()
        if len(raw) > MAX_DESCRIPTION_BYTES or count_values(raw) > MAX_DESCRIPTION_VALUES:
            raise CacheError(
                f"an entry's description has {len(raw)} bytes and up to {count_values(raw)} values; at most "
                f"{MAX_DESCRIPTION_BYTES} bytes and {MAX_DESCRIPTION_VALUES} values are allowed."
            )
        pending.append(writer.submit(archive.writestr, zipfile.ZipInfo(METADATA), raw))
        for written in pending:
            written.result()
    stream.flush()
    os.fsync(stream.fileno())
    return stream.tell()


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

    files: dict[str, Buffer] = {}
    _create(MemoryStore(files), "array", spec)
    found: dict[str, Json] = json.loads(files[f"array/{METADATA}"].to_bytes())
    return found


def _encode(name: str, array: NDArray[Any], *, compress: bool) -> Iterator[tuple[str, memoryview]]:
    """Yield the files of an array, as zarr makes them; all-zero chunks too."""
    from zarr.storage import MemoryStore

    num_chunks = max(1, math.ceil(array.nbytes / MAX_CHUNK_BYTES))
    chunk_length = max(1, math.ceil(len(array) / num_chunks))
    files: dict[str, Buffer] = {}
    _create(MemoryStore(files), name, _ArraySpec(array.dtype, len(array), chunk_length, compress))[:] = array
    for file, content in sorted(files.items()):  # zarr's threads store them in any order
        if file != METADATA:  # of the group above
            yield file, memoryview(content.as_numpy_array()).cast("B")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {preview(str(error), most=MAX_SHOWN)[1:-1]}"


def _text(value: Json) -> str:
    """Return JSON as text, in which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)
