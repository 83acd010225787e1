"""Arrays as zarr (format 3) files and back; the one file that knows zarr.

Nothing that a file says reaches zarr unchecked: an array's `zarr.json` must be, field by field, what this module writes
for the array, and chunks must have the sizes that follow from it. So there is no codec, dtype or shape to be surprised
by, and nothing is allocated that the files on disk do not bear out.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl_core.checksums import checksum
from rl_core.errors import BrokenEntryError, MissingExtraError
from rl_core.records import Json
from rl_rollout.skip.bounded_json import load_json, shown
from rl_rollout.skip.manifest import ArraySpec, FileSpec

if TYPE_CHECKING:
    import zarr

METADATA = "zarr.json"
CRC_BYTES = 4
MAX_CHUNK_BYTES = 1 << 24
MAX_METADATA_BYTES = 1 << 14
BLOSC_HEADER = struct.Struct("<BBBBIII")
"""Version, version of the codec, flags, type size, bytes of the content, of a block, and of the whole chunk."""
BLOSC_VERSION = 2
BLOSC_LZ4, BLOSC_FREE_FLAGS = 0x20, 0x16
"""Flags of a chunk by lz4; and those that it may have besides: bits are shuffled, stored as it is, blocks not split."""
MAX_RATIO = 256
"""lz4 makes at most 255 bytes of one."""


def plan_array(array: NDArray[Any], *, compress: bool) -> ArraySpec:
    """How an array is stored, before its files are known: in equal chunks of at most MAX_CHUNK_BYTES."""
    num_chunks = max(1, math.ceil(array.nbytes / MAX_CHUNK_BYTES))
    return ArraySpec(
        dtype=array.dtype.name,
        shape=(len(array),),
        chunk_length=max(1, math.ceil(len(array) / num_chunks)),
        is_compressed=compress,
        metadata=FileSpec(0, 0),
        chunks=(),
    )


def encode_array(array: NDArray[Any], plan: ArraySpec) -> tuple[ArraySpec, dict[str, bytes]]:
    """An array's files by name, `zarr.json` and `c/0`, `c/1` and so on, and what the manifest says of them.

    Raises:
        MissingExtraError: zarr is not installed.
    """
    metadata = json.dumps(array_metadata(plan), indent=1).encode()
    files = {METADATA: metadata}
    opened, encoded = _open({METADATA: metadata}, writable=True)
    opened[:] = array
    for index in range(plan.num_chunks):
        files[f"c/{index}"] = encoded[f"c/{index}"].to_bytes()
    chunks = [files[f"c/{index}"] for index in range(plan.num_chunks)]
    spec = ArraySpec(
        dtype=plan.dtype,
        shape=plan.shape,
        chunk_length=plan.chunk_length,
        is_compressed=plan.is_compressed,
        metadata=FileSpec(len(metadata), checksum(metadata)),
        chunks=tuple(FileSpec(len(chunk), int.from_bytes(chunk[-CRC_BYTES:], "little")) for chunk in chunks),
    )
    return spec, files


def check_sizes(spec: ArraySpec, *, path: str) -> None:
    """Refuse an array whose files cannot hold it, before any of them is read.

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
        raise BrokenEntryError(path, f"its {METADATA} has {spec.metadata.size_bytes} bytes; a few hundred are expected")
    if len(spec.chunks) != spec.num_chunks:
        raise BrokenEntryError(path, f"it needs {spec.num_chunks} chunks; the manifest lists {len(spec.chunks)}")
    for index, chunk in enumerate(spec.chunks):
        body = chunk.size_bytes - CRC_BYTES
        is_possible = body == chunk_bytes or (spec.is_compressed and 0 < body * MAX_RATIO >= chunk_bytes)
        if not is_possible or body > chunk_bytes + BLOSC_HEADER.size:
            raise BrokenEntryError(path, f"chunk {index} has {chunk.size_bytes} bytes, which cannot be {chunk_bytes}")


def decode_array(files: Mapping[str, bytes], spec: ArraySpec, *, path: str) -> NDArray[Any]:
    """The array that checked files hold; zarr compares every chunk with its crc32c.

    Args:
        files: As `encode_array` gave them; sizes have been checked.
        spec: What the manifest says of them.
        path: Of the array, for messages.

    Raises:
        BrokenEntryError: A file is not as the manifest says, or not as it must be.
        MissingExtraError: zarr is not installed.
    """
    _check_metadata(files[METADATA], spec, path=path)
    for index, chunk in enumerate(spec.chunks):
        content = files[f"c/{index}"]
        if int.from_bytes(content[-CRC_BYTES:], "little") != chunk.crc32c:
            raise BrokenEntryError(f"{path}/c/{index}", "its checksum is not the manifest's")
        if spec.is_compressed:
            _check_blosc(content, spec, path=f"{path}/c/{index}")
    # zarr reads what was checked against, and nothing of the file.
    canonical = json.dumps(array_metadata(spec)).encode()
    opened, _ = _open({**files, METADATA: canonical}, writable=False)
    try:
        values: NDArray[Any] = np.asarray(opened[:])
    except Exception as error:  # codecs raise many kinds
        raise BrokenEntryError(path, f"it cannot be decoded ({type(error).__name__}: {error})") from error
    return values


def array_metadata(spec: ArraySpec) -> dict[str, Json]:
    """The content of an array's `zarr.json`."""
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


def _check_metadata(content: bytes, spec: ArraySpec, *, path: str) -> None:
    where = f"{path}/{METADATA}"
    if checksum(content) != spec.metadata.crc32c:
        raise BrokenEntryError(where, "its checksum is not the manifest's")
    try:
        found = load_json(content, max_values=MAX_METADATA_BYTES)
    except (ValueError, RecursionError) as error:
        raise BrokenEntryError(where, f"it is not JSON ({type(error).__name__}: {error})") from None
    expected = array_metadata(spec)
    if not isinstance(found, dict) or set(found) != set(expected):
        raise BrokenEntryError(where, f"it must be an object with {', '.join(sorted(expected))}")
    for name, value in expected.items():
        if not _is_same(found[name], value):
            raise BrokenEntryError(where, f"{name} must be {json.dumps(value)}; found {shown(found[name])}")


def _is_same(found: Json, expected: Json) -> bool:
    """True when two JSON values are equal, and 1 is not 1.0 nor true in any place."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(_is_same(found[name], expected[name]) for name in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    return bool(found == expected)


def _check_blosc(content: bytes, spec: ArraySpec, *, path: str) -> None:
    """Refuse a compressed chunk that would become anything but one chunk of this array."""
    body_bytes, itemsize = len(content) - CRC_BYTES, np.dtype(spec.dtype).itemsize
    if body_bytes < BLOSC_HEADER.size:
        raise BrokenEntryError(path, f"it has {len(content)} bytes, too few for a compressed chunk")
    version, _, flags, typesize, num_bytes, block_bytes, compressed_bytes = BLOSC_HEADER.unpack_from(content)
    if version != BLOSC_VERSION or flags & ~BLOSC_FREE_FLAGS != BLOSC_LZ4 or not 0 < block_bytes <= num_bytes:
        raise BrokenEntryError(
            path, f"it must be compressed by lz4 in whole blocks; found version {version}, flags {flags:#x}"
        )
    expected = (itemsize, spec.chunk_length * itemsize, body_bytes)
    if (typesize, num_bytes, compressed_bytes) != expected:
        raise BrokenEntryError(
            path,
            f"its header speaks of {num_bytes} bytes in items of {typesize}, stored in {compressed_bytes}; expected "
            f"{expected[1]} in items of {expected[0]}, stored in {expected[2]}",
        )


def _open(files: Mapping[str, bytes], *, writable: bool) -> tuple["zarr.Array[Any]", dict[str, Any]]:
    """A zarr array over files in memory, and these files, which writing adds to."""
    try:
        import zarr
        from zarr.buffer.cpu import Buffer
        from zarr.storage import MemoryStore
    except ImportError as error:
        raise MissingExtraError("skip caches need zarr. Run: pip install 'rl-rollout[skip]'") from error
    content: dict[str, Any] = {name: Buffer.from_bytes(file) for name, file in files.items()}
    mode = "r+" if writable else "r"
    opened = zarr.open_array(MemoryStore(content, read_only=not writable), mode=mode, zarr_format=3)
    # Chunks of zeros are chunks like any other: zarr leaves them out unless told so.
    return opened.with_config({"write_empty_chunks": True}), content
