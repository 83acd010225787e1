"""What commands print: texts that nothing in a file can garble, tables, sizes, versions, and JSON."""

import contextlib
import importlib.metadata
import json
import os
import sys
import traceback
import unicodedata
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from types import TracebackType
from typing import Any

from rl_core.data.records import Json

MAX_WIDTH = 48


def printable(text: str, *, width: int | None = MAX_WIDTH) -> str:
    """Text in one line without anything that moves a cursor, changes a colour or hides; cut where it is too long."""
    shown = "".join(character if _is_plain(character) else _escaped(character) for character in text)
    return shown if width is None or len(shown) <= width else shown[: width - 3] + "..."


def escaped(text: str) -> str:
    r"""A text of any length in one line, with escapes for what cannot be seen (`\n`, `\x1b`, `\u202e`)."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def escaped_lines(text: str) -> str:
    """The same with its line ends, for messages that have several lines."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor for logs that go to a terminal; put it before the renderer."""
    return {key: escaped_lines(value) if isinstance(value, str) else value for key, value in event.items()}


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook` that prints what Python's own does, escaped."""
    sys.stderr.write(escaped_lines("".join(traceback.format_exception(kind, error, trace))))


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str]) -> Iterator[str]:
    """A table with a line of column names.

    Args:
        columns: Their names.
        rows: Of cells, one for each column.
        right: Names of the columns that are aligned to the right.
    """
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def bytes_text(size: float) -> str:
    """Bytes in the unit that suits them, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def describe_version(program: str) -> str:
    """Such as "rl-core 0.1.0", of a program whose distribution has its name."""
    try:
        return f"{program} {importlib.metadata.version(program)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{program}, from sources that are not installed"


def json_text(document: Json) -> str:
    """One JSON object, in which no control character is left as it is."""
    return json.dumps(document, indent=2).replace("\x7f", "\\u007f") + "\n"


def write_out(text: str) -> None:
    """Write to standard output, characters that it does not have written out.

    Raises:
        BrokenPipeError: The reader has closed the pipe, as `head` does; further output is dropped silently.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _is_plain(character: str) -> bool:
    return character.isprintable() and not unicodedata.category(character).startswith("M")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
