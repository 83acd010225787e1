"""The table of contents of a torch_dist folder: file and position of each tensor's rectangles."""

import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.plain_files import open_plain
from rl_distill.checkpoints.plain_pickle import Record, read_plain_pickle

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1 << 28
MAX_CHUNKS = 4096
MAX_EXTRA_BYTES = 1 << 16
"""Maximum bytes that torch stores in a chunk in addition to the elements."""

Shape = tuple[int, ...]

_METADATA = "torch.distributed.checkpoint.metadata."
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED = {
    *(_METADATA + name for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(_METADATA + name for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    _METADATA + "TensorStorageMetadata",
    _STORED,
    "torch.Size",
    "torch.serialization._get_layout",
    "builtins.getattr",  # a memory format, which is not used, in the enum pickles of Python 3.11.0 to 3.11.3
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *_DTYPES,
}
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}\.distcp")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor and its location.

    Attributes:
        offsets: Start of the rectangle along each axis.
        sizes: Size of the rectangle along each axis.
        file: Name of the file in the folder.
        start: Byte offset in the file.
        length: Length in bytes.
    """

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """The entry of a tensor in the table of contents.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Dtype of the elements.
        chunks: The stored rectangles.
    """

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def problem(self) -> str | None:
        """Describe why the chunks do not cover each element exactly once; None if they do."""
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            return f"has {len(self.chunks)} chunks; expected 1 to {MAX_CHUNKS}"
        for chunk in self.chunks:
            if len(chunk.sizes) != len(self.shape) or len(chunk.offsets) != len(self.shape):
                return f"has a chunk with {len(chunk.sizes)} axes"
            stops = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if 0 in chunk.sizes or any(stop > size for stop, size in zip(stops, self.shape, strict=True)):
                return f"has a chunk {list(chunk.sizes)} at {list(chunk.offsets)}, which is empty or exceeds the tensor"
            num_bytes = math.prod(chunk.sizes) * self.dtype.itemsize
            if not num_bytes <= chunk.length <= num_bytes + MAX_EXTRA_BYTES:
                return f"has a chunk of {num_bytes} bytes that is stored in {chunk.length} bytes"
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape) or self._overlaps():
            return "has chunks that miss a part of it, or overlap"
        return None

    def _overlaps(self) -> bool:
        starts = np.array([chunk.offsets for chunk in self.chunks], dtype=np.int64)
        stops = starts + np.array([chunk.sizes for chunk in self.chunks], dtype=np.int64)
        return any(
            bool(((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])).all(axis=1).any())
            for i in range(len(starts) - 1)
        )


def read_table(directory: Path) -> dict[str, ChunkedTensor]:
    """Read the stored tensors of a folder by name, after checking that all their bytes exist.

    Raises:
        CheckpointError: The table is missing, torn or too long, names a class or function that is not allowed, or
            locates chunks outside the folder's files or in overlapping bytes.
    """
    path = directory / METADATA_FILE
    with open_plain(path) as (stream, size):
        if size > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes; a table of contents must have at most {MAX_METADATA_BYTES}."
            )
        content = stream.read(size)
    try:
        table = _state(read_plain_pickle(content, allowed=_ALLOWED), "Metadata")
        places = _places(table["storage_data"])
        _check_places(directory, places)
        entries = table["state_dict_metadata"].items()
        return {_text(name): _tensor(name, entry, places) for name, entry in entries if not _is_bytes(entry)}
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a table of contents: {type(error).__name__}: {error}.") from None


_Places = dict[tuple[str, Shape], tuple[str, int, int]]


def _places(storage: Mapping[Record, Record]) -> _Places:
    """Return file, start and length of each chunk by (tensor name, chunk offsets)."""
    places: _Places = {}
    for index, stored in storage.items():
        key, value = _state(index, "MetadataIndex"), _state(stored, _STORED)
        if value.get("transform_descriptors"):
            raise CheckpointError("a chunk was transformed by an extension; extensions are not supported")
        file = _text(value["relative_path"])
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointError(f"it names the file {file[:200]!r}; expected a name like __0_0.distcp")
        of_chunk = (_text(key["fqn"]), () if key["offset"] is None else _shape(key["offset"]))
        if of_chunk in places:
            raise CheckpointError(f"it lists the same chunk of {of_chunk[0]!r} twice")
        places[of_chunk] = (file, _number(value["offset"]), _number(value["length"]))
    return places


def _check_places(directory: Path, places: _Places) -> None:
    """Check that every chunk has its own bytes in a regular file of the folder."""
    stops: dict[str, int] = {}
    for file, start, length in sorted(places.values()):
        if start < stops.get(file, 0):
            raise CheckpointError(f"it assigns the bytes at {start} of {file} to two chunks")
        stops[file] = start + length
    for file, stop in stops.items():
        try:
            status = (directory / file).stat(follow_symlinks=False)
        except OSError as error:
            raise CheckpointError(f"its file {file} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"its file {file} is a link, a folder or a device")
        if status.st_size < stop:
            raise CheckpointError(f"its file {file} is torn: expected at least {stop} bytes, found {status.st_size}")


def _is_bytes(entry: Any) -> bool:
    return isinstance(entry, Record) and entry.name == _METADATA + "BytesStorageMetadata"


def _tensor(name: str, entry: Any, places: _Places) -> ChunkedTensor:
    found = _state(entry, "TensorStorageMetadata")
    dtype, layout, *_ = _state(found["properties"], "TensorProperties", kind=tuple)
    if dtype.name not in _DTYPES or layout.args != ("torch.strided",):
        raise CheckpointError(f"tensor {name[:200]!r} must be a dense tensor; found {dtype} in another layout")
    chunks = []
    for chunk in found["chunks"]:
        state = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(state["offsets"]), _shape(state["sizes"])
        if (name, offsets) not in places:
            raise CheckpointError(f"it does not locate the chunk of {name!r} at {list(offsets)}")
        chunks.append(StoredChunk(offsets, sizes, *places[name, offsets]))
    return ChunkedTensor(_shape(found["size"]), _DTYPES[dtype.name], tuple(chunks))


def _state(value: Any, name: str, *, kind: type = dict) -> Any:
    """Return the state of a record, after checking its class."""
    full = name if "." in name else _METADATA + name
    if not isinstance(value, Record) or value.name != full or not isinstance(value.state, kind):
        raise TypeError(f"expected {name}, found {type(value).__name__}")
    return value.state


def _shape(value: Any) -> Shape:
    if not isinstance(value, Record) or value.name != "torch.Size" or not value.args or len(value.args) != 1:
        raise TypeError(f"expected a size, found {type(value).__name__}")
    (numbers,) = value.args
    if not isinstance(numbers, tuple) or len(numbers) > 16:
        raise TypeError("a size must have at most 16 axes")
    return tuple(_number(number) for number in numbers)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"expected an integer in [0, 2**62), found {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value
