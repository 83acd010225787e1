"""Texts that commands print."""

import sys

from rl_core.terminal_text import escaped_lines, write_out

MISTAKE = 2
"""Exit status after a mistake in settings or files."""

GIB = 2**30
MIB = 2**20


def complain(*lines: str, status: int = MISTAKE) -> int:
    """Print an error to stderr."""
    text = "".join(f"error: {line}\n" if index == 0 else f"{line}\n" for index, line in enumerate(lines))
    sys.stderr.write(escaped_lines(text))
    return status


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    write_out(f"{escaped_lines(line)}\n")


def counted(count: int, one: str, several: str = "") -> str:
    """Return a number with its noun, such as "1 step" or "2 steps".

    Args:
        count: The number.
        one: The singular.
        several: The plural; by default the singular with an "s".
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def size_text(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB below 1 GiB, such as "3.50 MiB"."""
    return f"{size_bytes / MIB:.2f} MiB" if size_bytes < GIB else f"{size_bytes / GIB:.2f} GiB"
