"""The table of contents of a torch_dist folder: the file and position of each tensor's rectangles."""

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
"""What torch's file of a chunk may have beside the elements."""

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
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *_DTYPES,
}
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}\.distcp")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor, and where it lies.

    Attributes:
        offsets: Where the rectangle begins.
        sizes: Its extent.
        file: Name of a file in the folder.
        start: Of its bytes in the file.
        length: Number of bytes.
    """

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a folder says of a tensor.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of its elements.
        chunks: The rectangles that were stored.
    """

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def problem(self) -> str | None:
        """What keeps the chunks from being the tensor, each element once; None for nothing."""
        if not 1 <= len(self.chunks) <= MAX_CHUNKS:
            return f"has {len(self.chunks)} chunks; 1 to {MAX_CHUNKS} were expected"
        for chunk in self.chunks:
            if len(chunk.sizes) != len(self.shape) or len(chunk.offsets) != len(self.shape):
                return f"has a chunk of {len(chunk.sizes)} axes"
            stops = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if 0 in chunk.sizes or any(stop > size for stop, size in zip(stops, self.shape, strict=True)):
                return f"has a chunk {list(chunk.sizes)} at {list(chunk.offsets)}, which is empty or reaches beyond it"
            num_bytes = math.prod(chunk.sizes) * self.dtype.itemsize
            if not num_bytes <= chunk.length <= num_bytes + MAX_EXTRA_BYTES:
                return f"has a chunk of {num_bytes} bytes stored in {chunk.length}"
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) != math.prod(self.shape) or self._overlaps():
            return "has chunks that lack a part of it, or hold a part twice"
        return None

    def _overlaps(self) -> bool:
        starts = np.array([chunk.offsets for chunk in self.chunks], dtype=np.int64)
        stops = starts + np.array([chunk.sizes for chunk in self.chunks], dtype=np.int64)
        return any(
            bool(((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])).all(axis=1).any())
            for i in range(len(starts) - 1)
        )


def read_table(directory: Path) -> dict[str, StoredTensor]:
    """What a folder holds, by name; files are there, and as long as the table says.

    Raises:
        CheckpointError: The table is missing, torn, too long, asks for something that could run code, or names
            bytes that are not in its folder's own files, or twice.
    """
    path = directory / METADATA_FILE
    with open_plain(path) as (stream, size):
        if size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; a table of contents has at most {MAX_METADATA_BYTES}.")
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
        raise CheckpointError(f"{path} is no table of contents: {type(error).__name__}: {error}.") from None


_Places = dict[tuple[str, Shape], tuple[str, int, int]]


def _places(storage: Mapping[Record, Record]) -> _Places:
    """File, start and length of each chunk by the tensor's name and the chunk's offsets."""
    places: _Places = {}
    for index, stored in storage.items():
        key, value = _state(index, "MetadataIndex"), _state(stored, _STORED)
        if value.get("transform_descriptors"):
            raise CheckpointError("it has a chunk that an extension transformed; this release has no extensions")
        file = _text(value["relative_path"])
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointError(f"it names the file {file[:200]!r}; files are named like __0_0.distcp")
        of_chunk = (_text(key["fqn"]), () if key["offset"] is None else _shape(key["offset"]))
        if of_chunk in places:
            raise CheckpointError(f"it has the same chunk of {of_chunk[0]!r} twice")
        places[of_chunk] = (file, _number(value["offset"]), _number(value["length"]))
    return places


def _check_places(directory: Path, places: _Places) -> None:
    """Every chunk has bytes of its own in a plain file of the folder."""
    stops: dict[str, int] = {}
    for file, start, length in sorted(places.values()):
        if start < stops.get(file, 0):
            raise CheckpointError(f"it gives the bytes at {start} of {file} to two chunks")
        stops[file] = start + length
    for file, stop in stops.items():
        try:
            status = (directory / file).stat(follow_symlinks=False)
        except OSError as error:
            raise CheckpointError(f"its file {file} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"its file {file} is a link, a folder or a device")
        if status.st_size < stop:
            raise CheckpointError(f"its file {file} is torn: {stop} bytes were written, {status.st_size} are there")


def _is_bytes(entry: Any) -> bool:
    return isinstance(entry, Record) and entry.name == _METADATA + "BytesStorageMetadata"


def _tensor(name: str, entry: Any, places: _Places) -> StoredTensor:
    found = _state(entry, "TensorStorageMetadata")
    dtype, layout, *_ = _state(found["properties"], "TensorProperties", kind=tuple)
    if dtype.name not in _DTYPES or layout.args != ("torch.strided",):
        raise CheckpointError(f"tensor {name[:200]!r} must be dense numbers; found {dtype} in another layout")
    chunks = []
    for chunk in found["chunks"]:
        state = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(state["offsets"]), _shape(state["sizes"])
        if (name, offsets) not in places:
            raise CheckpointError(f"it does not say in which file the chunk of {name!r} at {list(offsets)} is")
        chunks.append(StoredChunk(offsets, sizes, *places[name, offsets]))
    return StoredTensor(_shape(found["size"]), _DTYPES[dtype.name], tuple(chunks))


def _state(value: Any, name: str, *, kind: type = dict) -> Any:
    """The state of a record of that class."""
    full = name if "." in name else _METADATA + name
    if not isinstance(value, Record) or value.name != full or not isinstance(value.state, kind):
        raise TypeError(f"expected {name}, found {type(value).__name__}")
    return value.state


def _shape(value: Any) -> Shape:
    if not isinstance(value, Record) or value.name != "torch.Size" or not value.args or len(value.args) != 1:
        raise TypeError(f"expected a size, found {type(value).__name__}")
    (numbers,) = value.args
    if not isinstance(numbers, tuple) or len(numbers) > 16:
        raise TypeError("a size must have at most 16 numbers")
    return tuple(_number(number) for number in numbers)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"expected a number >= 0 that fits a file, found {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value
