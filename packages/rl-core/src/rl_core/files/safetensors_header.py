"""Headers of safetensors files, checked against the file's length before any library maps it."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from rl_core.errors import DataError, RLError
from rl_core.files.plain_files import count_values, open_plain, preview
from rl_core.record_fields import converts_arguments

MAX_HEADER_BYTES = 1 << 25
MAX_HEADER_VALUES = 1 << 22
MAX_AXES = 16
DTYPE_BITS = re.compile(r"BOOL|[BCFIU]+(\d+)(_\w+)?")
"""Names of dtypes, such as "BF16" and "F8_E4M3", with their bits; BOOL has 8."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_AXES)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in the header.

    Attributes:
        dtype: safetensors name of the dtype, such as "BF16".
        shape: Sizes of its axes.
        start: Offset of its first byte in the file.
        stop: Offset after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@converts_arguments
def read_safetensors_header(file: Path, *, error: type[RLError] = DataError) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        error: The path is not a regular file, its header is too long or invalid, or the file is too short for it.
    """
    with open_plain(file, error=error) as (stream, size):
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise error(f"{file} is truncated or not a safetensors file: its header has {length} bytes of {size}.")
        raw = stream.read(length)
    if count_values(raw) > MAX_HEADER_VALUES:
        raise error(f"the header of {file} must have at most {MAX_HEADER_VALUES} values; it may have more.")
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {
            name: _tensor(msgspec.json.decode(entry, type=_HeaderEntry), 8 + length, size)
            for name, entry in entries.items()
        }
    except (ValueError, RecursionError) as problem:  # msgspec's errors are ValueErrors
        raise error(f"{file} is truncated or not a safetensors file: {type(problem).__name__}: {problem}.") from None


def _tensor(entry: _HeaderEntry, behind_header: int, size: int) -> StoredTensor:
    dtype, (start, stop) = DTYPE_BITS.fullmatch(entry.dtype), entry.data_offsets
    if dtype is None:
        raise ValueError(f"the dtype {preview(entry.dtype)} is unknown")
    if not start <= stop <= size - behind_header:
        raise ValueError("a tensor must lie within the file; the file may be truncated")
    if (stop - start) * 8 != math.prod(entry.shape) * int(dtype[1] or 8):
        raise ValueError("a tensor's number of bytes must match its shape and dtype")
    return StoredTensor(entry.dtype, entry.shape, behind_header + start, behind_header + stop)
