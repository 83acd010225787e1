"""Output of commands: text safe for terminals, tables, sizes, versions and JSON."""

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
    """Return one line without control sequences or invisible characters, cut if it is too long."""
    plain = "".join(character if _is_plain(character) else _escaped(character) for character in text)
    return plain if width is None or len(plain) <= width else plain[: width - 3] + "..."


def escaped(text: str) -> str:
    r"""Return the text as one line of any length, with escapes for invisible characters (`\n`, `\x1b`, `\u202e`)."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def escaped_lines(text: str) -> str:
    """Escape text as `escaped` does, but keep its line breaks."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape the values of a log event; a structlog processor that precedes the renderer of a terminal."""
    return {key: escaped_lines(value) if isinstance(value, str) else value for key, value in event.items()}


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception as Python does, but escaped; for `sys.excepthook`."""
    sys.stderr.write(escaped_lines("".join(traceback.format_exception(kind, error, trace))))


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str]) -> Iterator[str]:
    """Return the lines of a table, with column names first.

    Args:
        columns: Names of the columns.
        rows: Rows of cells, one per column.
        right: Names of the right-aligned columns.
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
    """Return a size in bytes in a suitable unit, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def describe_version(program: str) -> str:
    """Return a program's name and version, such as "rl-core 0.1.0"; its distribution must have the same name."""
    try:
        return f"{program} {importlib.metadata.version(program)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{program}, not installed (run from source)"


def json_text(document: Json) -> str:
    """Return a JSON object as text, with every control character escaped."""
    return json.dumps(document, indent=2).replace("\x7f", "\\u007f") + "\n"


def use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if its locale has another encoding, such as ISO-8859-1.

    Settings, data and run folders are in UTF-8, so in such a locale, a path in them would not exist.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this program again


def write_out(text: str) -> None:
    """Write to standard output, with escapes for characters that its encoding lacks.

    Raises:
        BrokenPipeError: The reader closed the pipe, as `head` does; later output is silently dropped.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def say(line: str) -> None:
    """Print an escaped line and flush it, also into a pipe."""
    write_out(f"{escaped_lines(line)}\n")


def counted(count: int, one: str, several: str = "") -> str:
    """Return a number with its noun, such as "1 step" or "2 steps".

    Args:
        count: The number.
        one: The singular.
        several: The plural; by default the singular with an "s".
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def _is_plain(character: str) -> bool:
    return character.isprintable() and not unicodedata.category(character).startswith("M")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
