"""A chunk of a torch_dist file: a tensor as `torch.save` writes it, read without `torch.load`.

`torch.save` writes a zip with a pickle that describes the tensor and a member that holds its elements. The pickle is
read as plain records, the elements straight from the file; both are checked against the zip's checksums, which
`torch.load` passes over.
"""

import io
import math
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.plain_files import open_plain
from rl_distill.checkpoints.plain_pickle import PERSISTENT, read_plain_pickle
from rl_distill.checkpoints.torch_dist_table import Shape, StoredChunk

MAX_READ_BYTES = 1 << 20
MAX_PICKLE_BYTES = 1 << 14

_REBUILD = "torch._utils._rebuild_tensor_v2"
_ORDERED_DICT = "collections.OrderedDict"
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
}


class _Slice(io.RawIOBase):
    """A part of a file; a zip's table of contents is read only if it is short."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence] + offset
        if position < 0:
            raise ValueError("a place before the chunk")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size is None or size < 0 else min(size, left)
        if size > MAX_READ_BYTES:
            raise ValueError(f"{size} bytes at once, which no chunk needs")
        self._file.seek(self._start + self._position)
        found = self._file.read(size)
        self._position += len(found)
        return found


def read_chunk(directory: Path, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    """The elements of a chunk that `StoredTensor.problem` found nothing wrong with.

    Args:
        directory: The folder.
        chunk: Where it lies.
        dtype: Of its elements.

    Raises:
        CheckpointError: It is torn or damaged, or is no tensor of this shape and dtype.
    """
    path = directory / chunk.file
    with open_plain(path) as (stream, _):
        try:
            with zipfile.ZipFile(_Slice(stream, chunk.start, chunk.length)) as archive:
                return _read(archive, chunk.sizes, dtype)
        except Exception as error:  # a zip of torn bytes raises anything
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} is torn or damaged at byte {chunk.start}: {reason}.") from None


def _read(archive: zipfile.ZipFile, sizes: Shape, dtype: torch.dtype) -> Tensor:
    members = {name.rpartition("archive/")[2]: name for name in archive.namelist()}
    described = archive.getinfo(members["data.pkl"])
    elements = archive.getinfo(members["data/0"])
    num_bytes = math.prod(sizes) * dtype.itemsize
    if described.file_size > MAX_PICKLE_BYTES or elements.file_size != num_bytes:
        raise CheckpointError(f"it must hold {num_bytes} bytes of elements; found {elements.file_size}")
    if any(member.compress_type != zipfile.ZIP_STORED for member in (described, elements)):
        raise CheckpointError("it is compressed, which torch never does")
    if "byteorder" in members:
        order = archive.getinfo(members["byteorder"])
        if order.file_size != len(sys.byteorder) or archive.read(order) != sys.byteorder.encode():
            raise CheckpointError("it was written by a machine of another byte order")
    _check_description(archive.read(described), sizes, dtype)
    found = torch.empty(sizes, dtype=dtype)
    target = found.view(-1).view(torch.uint8).numpy()
    with archive.open(elements) as stream:
        position = 0
        while part := stream.read(MAX_READ_BYTES // 2):
            target[position : position + len(part)] = np.frombuffer(part, dtype=np.uint8)
            position += len(part)
    if position != num_bytes:
        raise CheckpointError(f"it ends after {position} of {num_bytes} bytes")
    return found


def _check_description(content: bytes, sizes: Shape, dtype: torch.dtype) -> None:
    """Refuse a pickle that describes anything but a contiguous tensor of this shape and dtype."""
    allowed = {_REBUILD, _ORDERED_DICT, *_STORAGES}
    made = read_plain_pickle(content, allowed=allowed)
    try:
        storage, offset, found_sizes, found_strides, *_ = made.args
        _, kind, key, _, numel = storage.args[0]
        found_dtype = _STORAGES[kind.name]
        is_plain = made.name == _REBUILD and storage.name == PERSISTENT
        strides = [stride for stride, size in zip(found_strides, sizes, strict=True) if size > 1]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise CheckpointError("its pickle describes no dense tensor") from None
    contiguous = [math.prod(sizes[axis + 1 :]) for axis, size in enumerate(sizes) if size > 1]
    found = (is_plain, key, offset, numel, found_sizes, strides, found_dtype)
    if found != (True, "0", 0, math.prod(sizes), sizes, contiguous, dtype):
        raise CheckpointError(f"it must hold a contiguous tensor {list(sizes)} of {dtype}; its pickle says otherwise")
