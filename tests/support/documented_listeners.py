"""The table of docs/guides/security.md, and listening sockets that are not in it."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from listening_sockets import Listening, listening_sockets

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "security.md"


def documented() -> list[tuple[list[str], list[str]]]:
    """Return the patterns of processes and addresses in each row."""
    rows = [line.split("|") for line in GUIDE.read_text().partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [(re.findall(r"`([^`]+)`", row[2]), re.findall(r"`([^`]+)`", row[3])) for row in rows[1:]]


def undocumented(pids: Iterable[int], *, played: Mapping[int, str] | None = None) -> list[str]:
    """Return listening sockets of these processes that are in no row.

    Args:
        pids: Processes.
        played: Command lines of processes that stand in for others.
    """
    rows = documented()
    found = []
    for one in sorted(listening_sockets(pids), key=str):
        words = (played or {}).get(one.pid) or command_line(one.pid)
        is_warm = "warm_start.serve()" in words  # a fork has its server's command line, so only its address is checked
        if not any(
            (is_warm or _matches(words, programs)) and _matches(one.address, places) for programs, places in rows
        ):
            found.append(f"{one} of {words}")
    return found


def command_line(pid: int) -> str:
    """Return the command line of a process, joined by spaces."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _matches(text: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


__all__ = ["Listening", "documented", "listening_sockets", "undocumented"]
