"""Ends what a role's process leaves behind; also a program of its own, which needs the standard library alone.

`python -I -S guard.py MARK PID...` waits in the background until one of the processes is gone, and then ends every
process that has the mark.

A role's children can outlive it: killed processes end nobody, and those that start a session of their own are in no
group that could be ended. All of them inherit the role's environment, which has the mark; it is read from /proc.
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

MARK_VARIABLE = "RL_ROLE_MARKS"
MARK_LENGTH = 32
LIMIT_S = 10.0
PAUSE_S = 0.02
LOOK_S = 0.5


def start_guard(mark: str, pids: Sequence[int]) -> None:
    """Start the program; it watches already when this returns.

    Raises:
        OSError: No process could be started.
        subprocess.CalledProcessError: One of the processes is gone, or the guard ran out of memory.
    """
    command = [sys.executable, "-I", "-S", __file__, mark, *map(str, pids)]
    environment = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    subprocess.run(  # noqa: S603 - our own file
        command, env=environment, check=True, start_new_session=True, stdin=subprocess.DEVNULL
    )


def end_marked(mark: str, *, spared: Sequence[int] = ()) -> None:
    """Kill every process that has the mark, and those that they start meanwhile; wait until none is left."""
    ends_at = time.monotonic() + LIMIT_S
    while found := [pid for pid in marked_processes(mark) if pid not in (os.getpid(), *spared)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > ends_at:
            return  # the kernel does not let them go, such as in a broken network drive
        time.sleep(PAUSE_S)


def marked_processes(mark: str) -> list[int]:
    """Processes of this host that have the mark, zombies apart.

    Raises:
        ValueError: The mark is too short to be one; an empty one would be that of every process.
    """
    if len(mark) < MARK_LENGTH:
        raise ValueError(f"a mark has {MARK_LENGTH} characters or more; found {mark!r}.")
    found, name = [], f"{MARK_VARIABLE}=".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            entries = (process / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(name) and mark.encode() in entry for entry in entries):
                found.append(int(process.name))
    return found


def is_running(pid: int) -> bool:
    """True for a process of this host that is there, and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def watch(pids: Sequence[int]) -> Callable[[], object]:
    """Something that waits until a process is gone.

    Raises:
        ProcessLookupError: One is gone already.
    """
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except (AttributeError, OSError) as error:
            if isinstance(error, ProcessLookupError):
                raise
            return lambda: _wait_by_looking(pids)  # before Linux 5.3
    return poll.poll


def _wait_by_looking(pids: Sequence[int]) -> None:
    while all(is_running(pid) for pid in pids):
        time.sleep(LOOK_S)


def main() -> None:
    """Watch in the background, then end everything marked."""
    mark, pids = sys.argv[1], [int(word) for word in sys.argv[2:]]
    wait = watch(pids)
    if os.fork():
        os._exit(0)  # whoever started this knows that it watches, and has no child that it does not know
    os.chdir("/")
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    wait()
    end_marked(mark)


if __name__ == "__main__":
    main()
