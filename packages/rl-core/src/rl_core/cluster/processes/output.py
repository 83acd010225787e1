"""Output of a role's process, to a log file or line by line to stderr; the last lines are kept for errors."""

import contextlib
import os
import re
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from rl_core.cluster.role_spec import RoleSpec
from rl_core.terminal_text import escaped

TAIL_LINES = 20
TAIL_BYTES = 4000
LINE_BYTES = 1 << 16
STDERR = 2
COLOUR = re.compile(r"\x1b\[[\d;]*m")
FOREIGN_PREFIXES = ("=== ", ":actor_name:", ":job_id:", ":task_name:")
"""Prefixes of lines printed by this module or Ray, not by the role."""


class FileOutput:
    """Appends output to a file, with a header line for each incarnation."""

    def __init__(self, folder: Path, spec: RoleSpec) -> None:
        """Choose the file <role>-<rank>.log."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = log_path(folder, spec)
        self._file: IO[bytes] | None = None
        self._start = 0

    def open_for_child(self) -> IO[bytes]:
        """Open the child's stdout and stderr."""
        self._file = self.path.open("ab")
        self._start = self._file.tell()
        return self._file

    def started(self, process: "subprocess.Popen[bytes]") -> None:  # noqa: ARG002
        """Handle the child's start."""
        if self._file is not None:
            self._file.close()

    def tail(self) -> str:
        """Return the last lines."""
        return read_tail(self.path, self._start)


class PrefixedOutput:
    """Prints each line to this process's stderr, prefixed with the role's name in brackets."""

    def __init__(self, spec: RoleSpec) -> None:
        """Set the role's name."""
        self._prefix = f"[{spec}] ".encode()
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._thread: threading.Thread | None = None

    def open_for_child(self) -> int:
        """Open the child's stdout and stderr."""
        return subprocess.PIPE

    def started(self, process: "subprocess.Popen[bytes]") -> None:
        """Handle the child's start."""
        self._thread = threading.Thread(target=self._copy, args=(process.stdout,), name="role output", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """Return the last lines."""
        if self._thread is not None:
            self._thread.join(1.0)  # the process has ended, but its last lines may still be in the pipe
        return last_lines(b"".join(self._lines))

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while line := pipe.readline(LINE_BYTES):
                self._lines.append(line[-TAIL_BYTES:])
                with contextlib.suppress(OSError):
                    os.write(STDERR, self._prefix + _terminal_line(line) + b"\n")


def _terminal_line(line: bytes) -> bytes:
    """Return a line that is safe for a terminal: the last state of a progress bar, without colours, escaped."""
    text = COLOUR.sub("", line.decode(errors="replace").rstrip("\r\n"))
    return escaped(text.rpartition("\r")[2].expandtabs()).encode()


def log_path(folder: Path, spec: RoleSpec) -> Path:
    """Return the path of a role's log file in a folder."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', spec.name)}-{spec.rank}.log"


def log_header(role: str, incarnation: int) -> str:
    """Return the header line of an incarnation in a log file."""
    return f"=== {role} incarnation {incarnation} pid {os.getpid()} {time.strftime('%Y-%m-%dT%H:%M:%S%z')} ===\n"


def read_tail(path: Path, start: int) -> str:
    """Return the last lines of a file after a position."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            return last_lines(file.read())
    except OSError as error:
        return f"({path} cannot be read: {error.strerror})"


def last_lines(text: bytes) -> str:
    """Return the last lines as text."""
    lines = text[-TAIL_BYTES:].decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def quote(tail: str) -> str:
    """Format the output for an error message."""
    lines = [line for line in tail.splitlines() if line.strip() and not line.startswith(FOREIGN_PREFIXES)]
    return "Its last output:\n" + "\n".join(f"  | {line}" for line in lines) if lines else "It printed nothing."
