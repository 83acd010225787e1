"""What commands print."""

import sys

from rl_core.terminal_text import escaped_lines, write_out


def complain(*lines: str, status: int = 2) -> int:
    """Print an error to stderr."""
    text = "".join(f"error: {line}\n" if index == 0 else f"{line}\n" for index, line in enumerate(lines))
    sys.stderr.write(escaped_lines(text))
    return status


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    write_out(f"{escaped_lines(line)}\n")
