"""Append-only files with one JSON object per line, which survive a kill at any moment."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rl_core.data import Json
from rl_core.errors import NotReadyError
from rl_core.record_fields import converts_arguments

log = structlog.get_logger(__name__)

BLOCK_BYTES = 1 << 20


class JsonLinesWriter:
    """Appends objects to a file, each in one write, so that readers see complete lines.

    The first append ends a truncated last line, left by a kill, so that it corrupts no other line.
    """

    @converts_arguments
    def __init__(self, path: Path) -> None:
        """Open or create the file, and its folder if missing.

        Args:
            path: Path of the file; existing lines are kept.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_torn = _ends_torn(self._file)

    def append(self, row: Mapping[str, Json]) -> None:
        """Write one line; on return, the operating system has it.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        line = json.dumps(as_plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self.append_line(line.encode("utf-8", errors="replace"))

    def append_line(self, line: bytes) -> None:
        """Write one line of JSON, given without its line break.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        if self._file is None:
            raise NotReadyError(f"{self.path} is closed; create a new JsonLinesWriter to append more.")
        view = memoryview(b"\n" * self._is_torn + line + b"\n")
        self._is_torn = True
        while view:
            view = view[os.write(self._file, view) :]
        self._is_torn = False

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of one line, or None if it is none. NaN and Infinity are accepted as numbers."""
    try:
        row = _ANYTHING.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


_ANYTHING = msgspec.json.Decoder()


@converts_arguments
def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, in order, even while it is written.

    Lines that are truncated or not a JSON object are skipped with one warning. A last line without a line
    break is skipped silently, because it may be incomplete.

    Args:
        path: Path of the file; later appends are not read.

    Raises:
        OSError: The file cannot be read.
    """
    return (row for _, row in numbered_json_lines(path))


def numbered_json_lines(
    path: Path, *, decode: Callable[[bytes], dict[str, Any] | None] = parse_line
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number of each object, from 1, and the object, as `read_json_lines` does.

    Args:
        path: Path of the file.
        decode: Returns the object of a line, or None.
    """
    num_bad = first_bad = 0
    for number, (line, is_ended) in enumerate(read_lines(path), start=1):
        row = decode(line)
        if row is not None:
            yield number, row
        elif is_ended and line.strip():
            num_bad += 1
            first_bad = first_bad or number
    if num_bad:
        log.warning("unreadable_lines", path=str(path), count=num_bad, first_line=first_bad)


def read_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield lines without their line breaks, and whether they have one; later appends are not read."""
    with path.open("rb", buffering=BLOCK_BYTES) as file:
        missing = os.fstat(file.fileno()).st_size
        for line in file:
            yield line.removesuffix(b"\n"), line.endswith(b"\n")
            missing -= len(line)
            if missing <= 0:
                return


def number_or_nan(value: Any) -> float:
    """Return a finite number that was read, or else NaN."""
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def number_or_none(value: object) -> float | None:
    """Return a finite number that was read, or None; booleans are not numbers."""
    number = math.nan if isinstance(value, bool) else number_or_nan(value)
    return None if math.isnan(number) else number


def json_text(value: Json) -> str | None:
    """Return a value to show, such as a ground truth: a text as it is, anything else as JSON, None without one."""
    return value if value is None or isinstance(value, str) else json.dumps(as_plain(value), ensure_ascii=False)


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def as_plain(value: Any) -> Json:
    """Return a value as JSON: NaN and infinities become null, numpy values numbers, and unknown objects text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(part) for part in value]
    if hasattr(value, "tolist"):
        return as_plain(value.tolist())
    return str(value)
