"""Position of a role in its code, read from a stack dump of the role or of a signal handler."""

import re
from pathlib import PurePath
from typing import NamedTuple

_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (\S+)')
_HEADER = re.compile(r"^(thread |task |Thread 0x|Current thread 0x)")
_SERVED = "rl_core/cluster/served.py"
_COLLECTIVES = "distributed_c10d.py"


class _Frame(NamedTuple):
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({PurePath(self.file).name}:{self.line})"


def place_of(stack: str, *, depth: int = 2) -> str:
    """Return the innermost frames of a role's current call, such as "all_reduce (c10d.py:9), called by step (a.py:3)".

    Empty if no call is running, or nothing is known.
    """
    frames = _working_frames(stack)
    return ", called by ".join(str(frame) for frame in reversed(frames[-depth:]))


def innermost_frames(stack: str, *, depth: int = 6) -> list[str]:
    """Return the frames of a stack's first thread, innermost first, such as "recv (socket.py:12)"."""
    first = next((frames for frames in _blocks(stack) if frames), [])
    return [str(frame) for frame in first[::-1][:depth]]


def is_in_collective(stack: str) -> bool:
    """Return True if a call waits for other ranks in torch.distributed."""
    return any(PurePath(frame.file).name == _COLLECTIVES for frame in _working_frames(stack))


def _working_frames(stack: str) -> list[_Frame]:
    """Return the frames of the thread or task that runs a method of the role, outermost first, from that method on."""
    for frames in _blocks(stack):
        indices = [index for index, frame in enumerate(frames) if frame.file.endswith(_SERVED)]
        if indices and indices[-1] + 1 < len(frames):
            return frames[indices[-1] + 1 :]
    return []


def _blocks(stack: str) -> list[list[_Frame]]:
    """Return the frames of each thread, then of each task, outermost first."""
    current: list[_Frame] = []
    threads, tasks = [current], list[list[_Frame]]()
    for line in stack.splitlines():
        if _HEADER.match(line):
            current = []
            (tasks if line.startswith("task ") else threads).append(current)
        elif found := _FRAME.match(line):
            frame = _Frame(*found.groups())
            current.append(frame)
    if "recent call first" in stack:
        threads = [frames[::-1] for frames in threads]
    return [*threads, *tasks]
