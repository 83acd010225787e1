"""Watches one program from outside: ends it at its limits, ends everything that it left, and reports.

`launcher.py` imports this file from its own folder, so it imports only the standard library.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

COUNTED_MEMORY = ("RssAnon", "RssShmem", "VmPTE", "VmSwap")
MAX_LOCKS_BYTES = 1 << 18  # of the kernel's list, which has about 50 bytes per lock

Spec = dict[str, Any]


def supervise(spec: Spec, status_fd: int, program: int) -> None:
    """Wait for the program under its limits, end everything that it left, and report the outcome."""
    started_at, exit_code = time.monotonic(), None
    while True:
        received = signal.sigtimedwait(awaited_signals(), spec["poll_s"])
        statuses = [status for pid, status in reap() if pid == program]
        if statuses:
            ended, exit_code = "exited", os.waitstatus_to_exitcode(statuses[0])
            break
        processes = [] if spec["level"] == "unconfined" else remaining()
        used_bytes = sum(map(memory_of, processes))
        over = (
            ("cancelled", received is not None and received.si_signo == signal.SIGTERM),
            ("wall_time", time.monotonic() - started_at > spec["limits"]["wall_s"]),
            ("processes", len(processes) > spec["limits"]["processes"]),  # first: every process adds memory
            ("memory", used_bytes > spec["limits"]["memory_bytes"] or holds_many_locks()),
        )
        ended = next((name for name, is_over in over if is_over), "")
        if ended:
            break
    end_all(spec)
    report(status_fd, {"ended": ended, "exit_code": exit_code})


def awaited_signals() -> set[signal.Signals]:
    """Return SIGCHLD and, outside a namespace, SIGTERM, which asks to end everything.

    The first process of a namespace ignores signals from inside it.
    """
    return {signal.SIGCHLD} if os.getpid() == 1 else {signal.SIGCHLD, signal.SIGTERM}


def report(status_fd: int, found: dict[str, Any]) -> None:
    """Write the outcome as one JSON line."""
    os.write(status_fd, json.dumps(found).encode() + b"\n")


def reap() -> list[tuple[int, int]]:
    """Collect the children that ended, including the program's orphans, with their statuses."""
    reaped: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            reaped.append(ended)
    return reaped


def remaining() -> list[int]:
    """Return the running processes of the program."""
    if os.getpid() != 1:
        return descendants()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]  # noqa: PTH208


def descendants() -> list[int]:
    """Return the descendants of this process. Orphans stay included, because this process is their reaper."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        for task in tasks_of(waiting.pop()):  # any thread can have children
            with contextlib.suppress(OSError):
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                waiting += children
    return found


def tasks_of(pid: int) -> list[Path]:
    """Return the threads of a process, the first one first; empty if the process is gone."""
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: task.name != str(pid))
    except OSError:
        return []


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process uses, including page tables but not mapped files."""
    for task in tasks_of(pid):  # a first thread that ended shows nothing while others still run
        with contextlib.suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            found = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(COUNTED_MEMORY))
            if found:
                return found
    return 0


def holds_many_locks() -> bool:
    """Return True in a namespace whose file locks fill kernel memory, which nothing else limits."""
    if os.getpid() != 1:
        return False  # elsewhere the list contains the locks of all processes
    with contextlib.suppress(OSError), Path("/proc/locks").open("rb") as file:
        return len(file.read(MAX_LOCKS_BYTES)) == MAX_LOCKS_BYTES
    return False


def end_all(spec: Spec) -> None:
    """Kill everything that the program started, in any session."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        kill_once(spec)
        reap()
        if os.getpid() == 1 or not descendants():
            return
        time.sleep(0.005)


def kill_once(spec: Spec) -> None:
    """Send SIGKILL to all processes of the program."""
    if os.getpid() == 1:
        kill_everyone()  # all at once except this one, the first of its namespace
    elif spec["level"] == "other_user":
        killer = os.fork()  # as the program's user, it can only kill that user's processes
        if killer == 0:
            become(spec["uid"])
            kill_everyone()
            os._exit(0)
    else:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def become(uid: int) -> None:
    """Change to another user, permanently."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def kill_everyone() -> None:
    """Send SIGKILL to every process that this one may signal, at once, so that no fork can escape."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
