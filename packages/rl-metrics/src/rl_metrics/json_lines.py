"""Files of one JSON object a line, only ever appended to, that survive a kill at any moment."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import NotReadyError
from rl_core.records import Json

log = structlog.get_logger(__name__)


class JsonLinesWriter:
    """Appends objects to a file, each in one write, so that a reader sees whole lines.

    A torn last line, left by a kill, gets its line end at the first append: it spoils no line but itself.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file; its folder is made where missing.

        Args:
            path: The file; what is in it stays.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_torn = _ends_torn(self._file)

    def append(self, row: Mapping[str, Json]) -> None:
        """Write one line; it is with the operating system when this returns.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        line = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self.append_line(line.encode("utf-8", errors="replace"))

    def append_line(self, line: bytes) -> None:
        """Write one line that is JSON already, without its end.

        Raises:
            NotReadyError: After `close`.
            OSError: The file cannot be written.
        """
        if self._file is None:
            raise NotReadyError(f"{self.path} is closed; make a new JsonLinesWriter to append more.")
        payload = line + b"\n"
        if self._is_torn:
            payload = b"\n" + payload
        self._is_torn = True
        view = memoryview(payload)
        while view:
            view = view[os.write(self._file, view) :]
        self._is_torn = False

    def close(self) -> None:
        """Close the file. Can be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; lines that are torn or no JSON object are left out, with one warning."""
    num_bad = 0
    first_bad = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            row = _parsed(line)
            if row is not None:
                yield row
            elif line.strip():
                num_bad += 1
                first_bad = first_bad or number
    if num_bad:
        log.warning("unreadable_lines", path=str(path), count=num_bad, first_line=first_bad)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _plain(value: Any) -> Json:
    """The value as JSON: NaN and infinities are null, numpy scalars numbers, anything unknown its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
