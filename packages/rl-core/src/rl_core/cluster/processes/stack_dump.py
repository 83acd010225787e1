"""Python stacks of an unresponsive process, written by a signal handler without the interpreter.

Each process of a role registers a C handler that does not need the GIL, so it works even if C code holds the GIL or
hangs. It reads frames that other threads may be changing, so it is the last resort.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rl_core.cluster.stacks import MAX_TEXT, cut_middle

POLL_S = 0.01
SETTLED_S = 0.1
"""A dump that has not grown for this long counts as complete; it has no end marker."""
_STATES = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "D": "waits in the kernel", "Z": "has ended"}


def register_dump(mark: str) -> None:
    """Register a signal handler that writes this process's stacks to an in-memory file; no-op if the signal is missing.

    Args:
        mark: Mark of this role's incarnation, which identifies the file.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create(_file_name(mark))
        faulthandler.register(_stack_signal(), file=descriptor, all_threads=True, chain=False)


def dump_of(pid: int, mark: str, *, deadline_s: float) -> str:
    """Return the stacks of a process on this host that registered with this mark, or why they are missing."""
    if sys.platform != "linux":
        return f"Dumping stacks by signal is not supported on {sys.platform}."
    try:
        process = os.pidfd_open(pid)  # refers to the same process even if the pid is reused
        try:
            file = os.open(_find_file(pid, mark), os.O_RDONLY)
            try:
                start = os.fstat(file).st_size
                signal.pidfd_send_signal(process, _stack_signal())
                text = _read_settled(file, start, time.monotonic() + deadline_s)
            finally:
                os.close(file)
        finally:
            os.close(process)
    except OSError as error:
        return f"Its stacks cannot be dumped by signal: {error.strerror}."
    if not text.strip():
        return f"It also did not answer a signal within {deadline_s:.1f} s: pid {pid} {process_state(pid)}."
    return f"Stacks dumped by signal (most recent call first):\n{text.strip()}"


def process_state(pid: int) -> str:
    """Describe the kernel's state of a process of this host, such as "is stopped by a signal (state T)"."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "does not exist"
    return f"{_STATES.get(letter, 'runs')} (state {letter})"


def _stack_signal() -> int:
    """Return an otherwise unused signal, which kills a process that has no handler for it."""
    if sys.platform == "linux":
        return int(signal.SIGRTMAX) - 5
    raise NotImplementedError("dumping stacks by signal is supported only on Linux.")


def _file_name(mark: str) -> str:
    return f"role-stacks-{mark}"


def _find_file(pid: int, mark: str) -> str:
    """Return the file's path under the process's file descriptors.

    Raises:
        OSError: The process has ended, belongs to another user, or has no such file.
    """
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if _file_name(mark) in str(path.readlink()):
                return str(path)
        except FileNotFoundError:  # closed meanwhile
            continue
    raise FileNotFoundError(2, "its signal handler is not registered yet")


def _read_settled(file: int, start: int, ends_at: float) -> str:
    never, size, since = threading.Event(), start, time.monotonic()
    while (now := time.monotonic()) < ends_at:
        found = os.fstat(file).st_size
        if found != size:
            size, since = found, now
        elif size > start and now - since >= SETTLED_S:
            break
        never.wait(POLL_S)
    return cut_middle(os.pread(file, max(size - start, 0), start).decode(errors="replace"), MAX_TEXT)
