"""Encoding and decoding of arrays as zarr (format 3) files; the only file that knows zarr's format and codecs.

The files are compatible with zarr; a test compares them with zarr's own. zarr itself is not used because it needs a
millisecond of thread switches to open an array, and three copies per chunk. File contents are not trusted: an array's
`zarr.json` must match, field by field, what this module writes for the array, and chunks must have the resulting sizes.
Therefore no codec, dtype or shape is unexpected, and no allocation exceeds what the files on disk justify.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_core.data.records import Json
from rl_core.errors import BrokenEntryError, MissingExtraError
from rl_core.files.durable import checksum
from rl_core.files.plain_files import load_json, preview

Parts = tuple[bytes | memoryview, ...]
"""Contents of a file as parts to write in order."""
METADATA = "zarr.json"
CRC_BYTES = 4
MAX_CHUNK_BYTES = 1 << 24
MAX_METADATA_BYTES = 1 << 14
BLOSC_HEADER = struct.Struct("<BBBBIII")
"""Version, codec version, flags, item size, and the sizes in bytes of the content, a block and the whole chunk."""
BLOSC_VERSION = 2
BLOSC_LZ4, BLOSC_FREE_FLAGS = 0x20, 0x16
"""Flag of an lz4 chunk, and the optional flags: bit shuffle, stored uncompressed, blocks not split."""
MAX_RATIO = 256
"""Maximum compression ratio; lz4 expands one byte to at most 255."""


class FileSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of an array.

    Attributes:
        size_bytes: Size of the file.
        crc32c: For a chunk, the checksum in its last four bytes; for `zarr.json`, the checksum of the whole file.
    """

    size_bytes: int
    crc32c: int


class ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One array with one axis.

    Attributes:
        dtype: numpy name of the dtype.
        shape: [number of values].
        chunk_length: Number of values per chunk.
        is_compressed: True if lz4 compresses the chunks.
        metadata: The array's `zarr.json`.
        chunks: The array's chunks, in order.
    """

    dtype: str
    shape: tuple[int]
    chunk_length: int
    is_compressed: bool
    metadata: FileSpec
    chunks: tuple[FileSpec, ...]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return math.ceil(self.shape[0] / self.chunk_length)


def plan_array(array: NDArray[Any], *, compress: bool, chunk_bytes: int | None = None) -> ArraySpec:
    """Plan how to store an array, before its files are known.

    Args:
        array: The array to store.
        compress: Whether to compress the chunks.
        chunk_bytes: Maximum size of the equal chunks; use small ones to read parts. None uses MAX_CHUNK_BYTES, the
            upper limit.
    """
    num_chunks = max(1, math.ceil(array.nbytes / min(chunk_bytes or MAX_CHUNK_BYTES, MAX_CHUNK_BYTES)))
    return ArraySpec(
        dtype=array.dtype.name,
        shape=(len(array),),
        chunk_length=max(1, math.ceil(len(array) / num_chunks)),
        is_compressed=compress,
        metadata=FileSpec(0, 0),
        chunks=(),
    )


def encode_array(array: NDArray[Any], plan: ArraySpec) -> tuple[ArraySpec, dict[str, Parts]]:
    """Return an array's files by name (`c/0`, `c/1`, ..., `zarr.json`) and their entry in the manifest.

    Raises:
        MissingExtraError: The library of zarr's codecs is not installed.
    """
    files: dict[str, Parts] = {}
    chunks = []
    for index in range(plan.num_chunks):
        body = _encode_chunk(array[index * plan.chunk_length : (index + 1) * plan.chunk_length], plan)
        crc32c = checksum(body)
        files[f"c/{index}"] = (body, crc32c.to_bytes(CRC_BYTES, "little"))
        chunks.append(FileSpec(len(body) + CRC_BYTES, crc32c))
    metadata = json.dumps(array_metadata(plan), indent=1).encode()
    files[METADATA] = (metadata,)
    spec = msgspec.structs.replace(plan, metadata=FileSpec(len(metadata), checksum(metadata)), chunks=tuple(chunks))
    return spec, files


def check_sizes(spec: ArraySpec, *, path: str) -> None:
    """Check that an array's files can hold it, before any file is read.

    Raises:
        BrokenEntryError: A shape, a chunk or a file has an impossible size.
    """
    length, chunk_bytes = spec.shape[0], spec.chunk_length * np.dtype(spec.dtype).itemsize
    if length < 0 or spec.chunk_length < 1 or chunk_bytes > MAX_CHUNK_BYTES + 8:
        raise BrokenEntryError(
            path,
            f"its shape is {list(spec.shape)} in chunks of {spec.chunk_length}; expected chunks of at most "
            f"{MAX_CHUNK_BYTES} bytes",
        )
    if spec.metadata.size_bytes > MAX_METADATA_BYTES:
        raise BrokenEntryError(
            path, f"its {METADATA} has {spec.metadata.size_bytes} bytes; expected at most {MAX_METADATA_BYTES}"
        )
    if len(spec.chunks) != spec.num_chunks:
        raise BrokenEntryError(path, f"it needs {spec.num_chunks} chunks; the manifest lists {len(spec.chunks)}")
    for index, chunk in enumerate(spec.chunks):
        body = chunk.size_bytes - CRC_BYTES
        is_possible = body == chunk_bytes or (spec.is_compressed and 0 < body * MAX_RATIO >= chunk_bytes)
        if not is_possible or body > chunk_bytes + BLOSC_HEADER.size:
            raise BrokenEntryError(
                path, f"chunk {index} has {chunk.size_bytes} bytes, which cannot decode to {chunk_bytes}"
            )


def decode_array(files: Mapping[str, memoryview], spec: ArraySpec, *, path: str) -> NDArray[Any]:
    """Return the array in these files, after checking each file's checksum.

    Args:
        files: Files by name as in `encode_array`, with checked sizes. The array may share their memory.
        spec: The array's entry in the manifest.
        path: Path of the array, for error messages.

    Raises:
        BrokenEntryError: A file differs from the manifest, or is invalid.
        MissingExtraError: The library of zarr's codecs is not installed.
    """
    check_metadata(bytes(files[METADATA]), spec, path=path)
    bodies = [
        _checked_body(files[f"c/{index}"], chunk, path=f"{path}/c/{index}") for index, chunk in enumerate(spec.chunks)
    ]
    if len(bodies) == 1 and not spec.is_compressed:
        return np.frombuffer(bodies[0], dtype=_stored_dtype(spec))[: spec.shape[0]]
    values = np.empty(spec.num_chunks * spec.chunk_length, dtype=_stored_dtype(spec))
    for index, body in enumerate(bodies):
        place = values[index * spec.chunk_length : (index + 1) * spec.chunk_length]
        _decode_chunk(body, place, spec, path=f"{path}/c/{index}")
    return values[: spec.shape[0]]


def decode_chunk(content: memoryview, index: int, spec: ArraySpec, *, path: str) -> NDArray[Any]:
    """Return the values of one chunk, after checking its checksum; for reading a part of an array.

    Args:
        content: The file; its size and the array's metadata are already checked. The array may share its memory.
        index: Index of the chunk.
        spec: The array's entry in the manifest.
        path: Path of the array, for error messages.

    Raises:
        BrokenEntryError: The chunk differs from the manifest, or is invalid.
        MissingExtraError: The library of zarr's codecs is not installed.
    """
    where = f"{path}/c/{index}"
    body = _checked_body(content, spec.chunks[index], path=where)
    length = min(spec.chunk_length, spec.shape[0] - index * spec.chunk_length)
    if not spec.is_compressed:
        return np.frombuffer(body, dtype=_stored_dtype(spec))[:length]
    values = np.empty(spec.chunk_length, dtype=_stored_dtype(spec))
    _decode_chunk(body, values, spec, path=where)
    return values[:length]


def array_metadata(spec: ArraySpec) -> dict[str, Json]:
    """Return the contents of an array's `zarr.json`."""
    itemsize = np.dtype(spec.dtype).itemsize
    byte_order = {"name": "bytes"} if itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    blosc = {"typesize": itemsize, "cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
    compressors = [{"name": "blosc", "configuration": blosc}] if spec.is_compressed else []
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [spec.chunk_length]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if spec.dtype == "bool" else 0,
        "codecs": [byte_order, *compressors, {"name": "crc32c"}],
        "attributes": {},
        "storage_transformers": [],
    }


def check_metadata(content: bytes, spec: ArraySpec, *, path: str) -> None:
    """Check that a `zarr.json` matches the array's entry in the manifest.

    Raises:
        BrokenEntryError: The metadata differs.
    """
    where = f"{path}/{METADATA}"
    if checksum(content) != spec.metadata.crc32c:
        raise BrokenEntryError(where, "its checksum differs from the manifest")
    try:
        found = load_json(content, max_values=MAX_METADATA_BYTES)
        fields = found if isinstance(found, dict) else {}
        texts = {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}  # 1, 1.0 and true differ
    except (ValueError, RecursionError) as error:
        raise BrokenEntryError(where, f"it is not JSON ({type(error).__name__}: {error})") from None
    expected = array_metadata(spec)
    if texts.keys() != expected.keys():
        raise BrokenEntryError(where, f"it must be an object with {', '.join(sorted(expected))}")
    for name, value in expected.items():
        if texts[name] != json.dumps(value, sort_keys=True):
            raise BrokenEntryError(where, f"{name} must be {json.dumps(value)}; found {preview(found[name])}")


def _check_blosc(body: memoryview, spec: ArraySpec, *, path: str) -> None:
    """Check that a compressed chunk decodes to exactly one chunk of this array."""
    itemsize = np.dtype(spec.dtype).itemsize
    if len(body) < BLOSC_HEADER.size:
        raise BrokenEntryError(path, f"it has {len(body)} bytes, too few for a compressed chunk")
    version, _, flags, typesize, num_bytes, block_bytes, compressed_bytes = BLOSC_HEADER.unpack_from(body)
    if version != BLOSC_VERSION or flags & ~BLOSC_FREE_FLAGS != BLOSC_LZ4 or not 0 < block_bytes <= num_bytes:
        raise BrokenEntryError(
            path, f"it must be compressed by lz4 in whole blocks; found version {version}, flags {flags:#x}"
        )
    expected = (itemsize, spec.chunk_length * itemsize, len(body))
    if (typesize, num_bytes, compressed_bytes) != expected:
        raise BrokenEntryError(
            path,
            f"its header declares {num_bytes} bytes in items of {typesize}, stored in {compressed_bytes}; expected "
            f"{expected[1]} in items of {expected[0]}, stored in {expected[2]}",
        )


def _stored_dtype(spec: ArraySpec) -> np.dtype[Any]:
    return np.dtype(spec.dtype).newbyteorder("<")


def _encode_chunk(values: NDArray[Any], plan: ArraySpec) -> bytes | memoryview:
    """Encode a chunk without its checksum; the last chunk is padded to zarr's equal size."""
    padding = plan.chunk_length - len(values)
    padded = np.pad(values, (0, padding)) if padding else values
    octets = np.ascontiguousarray(padded, dtype=_stored_dtype(plan)).view(np.uint8)
    if not plan.is_compressed:
        return octets.data
    encoded: bytes = _compressor(plan).encode(octets)
    return encoded


def _checked_body(content: memoryview, chunk: FileSpec, *, path: str) -> memoryview:
    """Return a chunk without its checksum, after checking that against the content and the manifest."""
    body, stored = content[:-CRC_BYTES], int.from_bytes(content[-CRC_BYTES:], "little")
    if stored != chunk.crc32c:
        raise BrokenEntryError(path, "its checksum differs from the manifest")
    if checksum(body) != stored:
        raise BrokenEntryError(path, "its content does not match its checksum")
    return body


def _decode_chunk(body: memoryview, place: NDArray[Any], spec: ArraySpec, *, path: str) -> None:
    """Decode a chunk into its place in the array."""
    if not spec.is_compressed:
        place[:] = np.frombuffer(body, dtype=place.dtype)
        return
    _check_blosc(body, spec, path=path)
    try:
        _compressor(spec).decode(body, out=place)
    except (RuntimeError, ValueError) as error:
        raise BrokenEntryError(path, f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _compressor(spec: ArraySpec) -> Any:
    """Return zarr's codec for the metadata of `array_metadata`."""
    try:
        from numcodecs.blosc import Blosc
    except ImportError as error:
        raise MissingExtraError("arrays on disk need zarr's codecs. Install rl-core[zarr].") from error
    itemsize = np.dtype(spec.dtype).itemsize
    return Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE, blocksize=0, typesize=itemsize)
