"""Headers of safetensors files, checked against the file's length before any library maps it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, RLError
from rl_core.files.plain_files import count_values, open_plain
from rl_core.record_fields import converts_arguments

MAX_HEADER_BYTES = 1 << 25
MAX_HEADER_VALUES = 1 << 22
MAX_AXES = 16
_DTYPES_BY_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "I64 U64 F64 C64",
}
ITEM_BITS = {name: bits for bits, names in _DTYPES_BY_BITS.items() for name in names.split()}


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
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return {name: _tensor(form, 8 + length, size) for name, form in header.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as problem:
        raise error(f"{file} is truncated or not a safetensors file: {type(problem).__name__}: {problem}.") from None


def _tensor(form: Any, behind_header: int, size: int) -> StoredTensor:
    dtype, shape, (start, stop) = form["dtype"], form["shape"], form["data_offsets"]
    if dtype not in ITEM_BITS:
        raise ValueError(f"a tensor's dtype must be one of {', '.join(ITEM_BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_AXES or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"a tensor's shape must be at most {MAX_AXES} non-negative integers")
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= size - behind_header:
        raise ValueError("a tensor must lie within the file; the file may be truncated")
    if (stop - start) * 8 != math.prod(shape) * ITEM_BITS[dtype]:
        raise ValueError("a tensor's number of bytes must match its shape and dtype")
    return StoredTensor(dtype, tuple(shape), behind_header + start, behind_header + stop)
