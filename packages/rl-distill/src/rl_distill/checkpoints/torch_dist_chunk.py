"""Read a chunk of a torch_dist file: a tensor in the format of `torch.save`, without `torch.load`.

`torch.save` writes a zip with a pickle that describes the tensor and a member that holds its elements. The pickle is
decoded as plain records, and the elements are read directly from the file. Both are verified against the zip's
checksums, which `torch.load` ignores.
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
    """A byte range of a file. Single reads are limited, so that a huge zip directory is never loaded."""

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
            raise ValueError("position before the start of the chunk")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size is None or size < 0 else min(size, left)
        if size > MAX_READ_BYTES:
            raise ValueError(f"a read of {size} bytes at once, more than any chunk needs")
        self._file.seek(self._start + self._position)
        found = self._file.read(size)
        self._position += len(found)
        return found


def read_chunk(directory: Path, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    """Read the elements of a chunk for which `ChunkedTensor.problem` returned None.

    Args:
        directory: The torch_dist folder.
        chunk: Location of the chunk.
        dtype: Dtype of the elements.

    Raises:
        CheckpointError: The chunk is torn or damaged, or is not a tensor of this shape and dtype.
    """
    path = directory / chunk.file
    with open_plain(path) as (stream, _):
        try:
            with zipfile.ZipFile(_Slice(stream, chunk.start, chunk.length)) as archive:
                return _read(archive, chunk.sizes, dtype)
        except Exception as error:  # a torn zip can raise any error
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} is torn or damaged at byte {chunk.start}: {reason}.") from None


def _read(archive: zipfile.ZipFile, sizes: Shape, dtype: torch.dtype) -> Tensor:
    members = {name.rpartition("archive/")[2]: name for name in archive.namelist()}
    described = archive.getinfo(members["data.pkl"])
    elements = archive.getinfo(members["data/0"])
    num_bytes = math.prod(sizes) * dtype.itemsize
    if described.file_size > MAX_PICKLE_BYTES:
        size = described.file_size
        raise CheckpointError(f"the chunk's pickle has {size} bytes; at most {MAX_PICKLE_BYTES} are allowed")
    if elements.file_size != num_bytes:
        raise CheckpointError(f"the chunk must have {num_bytes} bytes of elements; found {elements.file_size}")
    if any(member.compress_type != zipfile.ZIP_STORED for member in (described, elements)):
        raise CheckpointError("the chunk is compressed, but torch never compresses")
    if "byteorder" in members:
        order = archive.getinfo(members["byteorder"])
        if order.file_size != len(sys.byteorder) or archive.read(order) != sys.byteorder.encode():
            raise CheckpointError("the chunk was written on a machine with a different byte order")
    _check_description(archive.read(described), sizes, dtype)
    found = torch.empty(sizes, dtype=dtype)
    target = found.view(-1).view(torch.uint8).numpy()
    with archive.open(elements) as stream:
        position = 0
        while part := stream.read(MAX_READ_BYTES // 2):
            target[position : position + len(part)] = np.frombuffer(part, dtype=np.uint8)
            position += len(part)
    if position != num_bytes:
        raise CheckpointError(f"the chunk ends after {position} of {num_bytes} bytes")
    return found


def _check_description(content: bytes, sizes: Shape, dtype: torch.dtype) -> None:
    """Check that a pickle describes a contiguous tensor of this shape and dtype."""
    allowed = {_REBUILD, _ORDERED_DICT, *_STORAGES}
    made = read_plain_pickle(content, allowed=allowed)
    try:
        storage, offset, found_sizes, found_strides, *_ = made.args
        _, kind, key, _, numel = storage.args[0]
        found_dtype = _STORAGES[kind.name]
        is_plain = made.name == _REBUILD and storage.name == PERSISTENT
        strides = [stride for stride, size in zip(found_strides, sizes, strict=True) if size > 1]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise CheckpointError("its pickle does not describe a dense tensor") from None
    contiguous = [math.prod(sizes[axis + 1 :]) for axis, size in enumerate(sizes) if size > 1]
    found = (is_plain, key, offset, numel, found_sizes, strides, found_dtype)
    if found != (True, "0", 0, math.prod(sizes), sizes, contiguous, dtype):
        raise CheckpointError(
            f"the chunk must be a contiguous tensor {list(sizes)} of {dtype}; its pickle describes another"
        )
