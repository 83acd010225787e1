"""Bounded reads of untrusted files, JSON and headers of safetensors: opens never block, and errors name the file."""

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec

from rl_core.data.records import Json
from rl_core.errors import DataError, RLError
from rl_core.record_fields import converts_arguments

FormT = TypeVar("FormT")
MAX_JSON_BYTES = 1 << 26
MAX_JSON_VALUES = 1 << 21
"""Maximum number of values in a document; each needs up to 200 bytes besides its text."""

MAX_TOML_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 25
MAX_HEADER_VALUES = 1 << 22
MAX_AXES = 16
DTYPE_BITS = re.compile(r"BOOL|[BCFIU]+(\d+)(_\w+)?")
"""Names of dtypes, such as "BF16" and "F8_E4M3", with their bits; BOOL has 8."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


@contextmanager
@converts_arguments
def open_plain(file: Path, *, error: type[RLError] = DataError) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading, and return its size with it.

    Args:
        file: Path of the file.
        error: Exception class to raise if the file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # a pipe without a writer would block forever
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        raise error(f"{file} does not exist.") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error(f"{file} must be a readable regular file: {reason}.") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"{file} must be a regular file; it is a folder, a pipe, a socket or a device.")
    with os.fdopen(descriptor, "rb") as stream:
        yield stream, status.st_size


def read_plain(file: Path, *, max_bytes: int, error: type[RLError] = DataError) -> bytes:
    """Return the bytes of a regular file of limited size; see `open_plain`."""
    with open_plain(file, error=error) as (stream, size):
        if size > max_bytes:
            raise error(f"{file} must have at most {max_bytes} bytes; it has {size}.")
        try:
            return stream.read(size)
        except OSError as problem:
            raise error(f"{file} cannot be read: {problem.strerror}.") from None


def require_plain(file: Path, *, error: type[RLError] = DataError) -> int:
    """Return the size of a regular file; raise for a pipe or device, on which a library would block."""
    with open_plain(file, error=error) as (_, size):
        return size


def read_json(
    file: Path,
    *,
    max_bytes: int = MAX_JSON_BYTES,
    max_values: int = MAX_JSON_VALUES,
    error: type[RLError] = DataError,
) -> Json:
    """Parse the JSON document in a file; refuse one that could have too many values before parsing."""
    raw = read_plain(file, max_bytes=max_bytes, error=error)
    num_values = count_values(raw)
    if num_values > max_values:
        raise error(f"{file} may have {num_values} values; the limit is {max_values}.")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise error(f"{file} must be JSON ({_json_problem(problem)}).") from None


def read_json_object(file: Path, *, error: type[RLError] = DataError) -> dict[str, Any]:
    """Parse the JSON object in a file; see `read_json`."""
    found = read_json(file, error=error)
    if not isinstance(found, dict):
        raise error(f"{file} must contain a JSON object; found {type(found).__name__}.")
    return found


def read_record(file: Path, form: type[FormT], *, error: type[RLError] = DataError) -> FormT:
    """Read a JSON file that a trainer wrote into a run's folder, as a record of this type.

    Raises:
        error: The file is missing or damaged: it is not JSON of this type.
    """
    with open_plain(file, error=error) as (stream, _):
        try:
            return msgspec.json.decode(stream.read(), type=form)
        except (ValueError, RecursionError) as problem:  # msgspec's errors are ValueErrors
            raise error(f"{file} is damaged: {problem}.") from None


def read_toml(file: Path, *, error: type[RLError] = DataError) -> dict[str, Any]:
    """Parse the TOML document in a file."""
    return parse_toml(read_plain(file, max_bytes=MAX_TOML_BYTES, error=error), where=str(file), error=error)


def parse_toml(raw: bytes | str, *, where: str, error: type[RLError] = DataError) -> dict[str, Any]:
    """Parse a TOML document.

    Args:
        raw: The document.
        where: Name of the document in error messages.
        error: Exception class to raise if the document cannot be read.
    """
    try:
        return tomllib.loads(raw.decode() if isinstance(raw, bytes) else raw)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not TOML: {problem}.") from None


def _json_problem(problem: Exception) -> str:
    """Return the problem of a JSON document, with its position only once."""
    if isinstance(problem, json.JSONDecodeError):
        return f"line {problem.lineno}, column {problem.colno}: {problem.msg}"
    return f"{type(problem).__name__}: {problem}"


def load_json(raw: bytes, *, max_values: int) -> Json:
    """Parse a JSON document; refuse one that could have too many values before any object is created.

    The document must be ASCII with escapes, as Python writes it. A value needs at most 200 bytes besides its text, so
    the text's size and the number of values bound the memory.

    Raises:
        ValueError: The document has too many values, or is not ASCII JSON.
        RecursionError: The document is nested too deeply.
    """
    num_values = count_values(raw)
    if num_values > max_values:
        raise ValueError(f"it may have {num_values} values; the limit is {max_values}")
    return json.loads(raw.decode("ascii"))


def count_values(raw: bytes) -> int:
    """Return an upper bound of the number of values in a JSON document; commas in strings count too."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def preview(value: object, *, most: int = 80) -> str:
    """Return a value for a message: printable characters only, cut to a maximum length."""
    text = ascii(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


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
    """Return the tensors of a safetensors file by name, checked against its length before any library maps it.

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
