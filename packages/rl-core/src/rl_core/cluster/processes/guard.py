"""Ends leftover processes of a role; also a standalone program that needs only the standard library.

`python -I -S guard.py MARK LEADER KNOWN PID...` waits in the background until one of the processes ends, then ends the
family.

A role's children can outlive it: killing a process does not end its children, which init adopts. A *family* consists of
the processes in its session or process group (`LEADER`), those with its mark in their environment (which descendants
inherit unless they overwrite it), and the children of all these. The source of this information is /proc.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

MARK_VARIABLE = "RL_ROLE_MARKS"
MARK_LENGTH = 32
LIMIT_S = 10.0
PAUSE_S = 0.02
NUM_SCANS = 2
POLL_S = 0.5


class ProcessFamily(NamedTuple):
    """Identifies processes that belong together.

    Attributes:
        mark: Mark in their environment, at least 32 characters to rule out accidental matches.
        leader: Their session or process group; 0 if they have none of their own.
        known: Further processes, each with its start time.
    """

    mark: str
    leader: int = 0
    known: frozenset[tuple[int, int]] = frozenset()


class _Process(NamedTuple):
    """A process's entry in /proc."""

    is_zombie: bool
    parent: int
    group: int
    session: int
    started: int


def start_guard(family: ProcessFamily, watched: Sequence[int]) -> int:
    """Start the guard with an empty environment; it is watching when this returns.

    Returns:
        Process id of the guard, which ends by itself.

    Raises:
        OSError: The process could not be started.
        subprocess.CalledProcessError: A watched process has already ended, or the guard ran out of memory.
    """
    known = ",".join(f"{pid}:{started}" for pid, started in family.known)
    words = [family.mark, str(family.leader), known, *map(str, watched)]
    started = subprocess.run(  # noqa: S603 - our own file
        [sys.executable, "-I", "-S", __file__, *words],
        env={},
        check=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    return int(started.stdout)


def end_family(family: ProcessFamily) -> None:
    """Kill every process of a family except this one, including newly started ones, and wait for their end.

    Raises:
        ValueError: See `family_members`.
    """
    ends_at = time.monotonic() + LIMIT_S
    num_empty = 0
    while num_empty < NUM_SCANS:  # a process that just started has no environment yet
        found = [pid for pid in family_members(family) if pid != os.getpid()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        num_empty = 0 if found else num_empty + 1
        if time.monotonic() > ends_at:
            return  # the kernel cannot end them, for example during I/O on a broken network drive
        time.sleep(PAUSE_S)


def family_members(family: ProcessFamily) -> list[int]:
    """Return the processes of this host that belong to a family, except zombies.

    Raises:
        ValueError: The mark is too short; an empty one would match every process.
    """
    if len(family.mark) < MARK_LENGTH:
        raise ValueError(f"a mark must have at least {MARK_LENGTH} characters; found {family.mark!r}.")
    processes = {pid: process for pid, process in _processes().items() if not process.is_zombie}
    found = {pid for pid, process in processes.items() if _belongs(family, pid, process)}
    while children := {pid for pid, process in processes.items() if process.parent in found} - found:
        found |= children
    return sorted(found)


def descendants(pid: int) -> frozenset[tuple[int, int]]:
    """Return all descendants of a process, each with its start time."""
    processes, found = _processes(), {pid}
    while children := {child for child, process in processes.items() if process.parent in found} - found:
        found |= children
    return frozenset((child, processes[child].started) for child in found if child != pid)


def running_processes() -> list[int]:
    """Return all processes of this host, except zombies."""
    return [pid for pid, process in _processes().items() if not process.is_zombie]


def is_running(pid: int) -> bool:
    """Return True if a process of this host exists and is not a zombie."""
    process = _read(pid)
    return process is not None and not process.is_zombie


def _belongs(family: ProcessFamily, pid: int, process: _Process) -> bool:
    if family.leader and family.leader in (process.session, process.group):
        return True
    if (pid, process.started) in family.known:
        return True
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
    name, mark = f"{MARK_VARIABLE}=".encode(), family.mark.encode()
    return any(entry.startswith(name) and mark in entry for entry in entries)


def _processes() -> dict[int, _Process]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: process for pid in pids if (process := _read(pid)) is not None}


def _read(pid: int) -> _Process | None:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Process(words[0] == "Z", int(words[1]), int(words[2]), int(words[3]), int(words[19]))


def watch(pids: Sequence[int]) -> Callable[[], object]:
    """Return a function that waits until one of the processes ends.

    Raises:
        ProcessLookupError: A process has already ended.
    """
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except (AttributeError, OSError) as error:
            if isinstance(error, ProcessLookupError):
                raise
            return lambda: _poll(pids)  # before Linux 5.3
    return poll.poll


def _poll(pids: Sequence[int]) -> None:
    while all(is_running(pid) for pid in pids):
        time.sleep(POLL_S)


def main() -> None:
    """Watch in the background, then end the family."""
    mark, leader, known, *pids = sys.argv[1:]
    pairs = [word.split(":") for word in known.split(",") if word]
    family = ProcessFamily(mark, int(leader), frozenset((int(pid), int(started)) for pid, started in pairs))
    wait = watch([int(pid) for pid in pids])
    if guard := os.fork():
        os.write(1, str(guard).encode())
        os._exit(0)  # the starter now knows that the guard watches; the guard is not its child
    os.chdir("/")
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    wait()
    end_family(family)


if __name__ == "__main__":
    main()
