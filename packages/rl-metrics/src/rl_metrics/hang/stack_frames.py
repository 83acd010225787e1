"""Position of a role in its code, read from a stack dump of the role or of a signal handler."""

import re
from pathlib import PurePath

_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (\S+)')
_HEADER = re.compile(r"^(thread |task |Thread 0x|Current thread 0x)")
_SERVED = "rl_core/cluster/served.py"


def innermost_frames(stack: str, *, depth: int = 6) -> list[str]:
    """Return frames such as "recv (socket.py:12)", innermost first.

    They are those of the thread or task that runs a method of the role, from that method on, or else of the first
    thread.
    """
    blocks = _blocks(stack)
    chosen = next(filter(None, blocks), [])
    for frames in blocks:
        served = [index for index, (file, *_) in enumerate(frames) if file.endswith(_SERVED)]
        if served and frames[served[-1] + 1 :]:
            chosen = frames[served[-1] + 1 :]
            break
    return [f"{function} ({PurePath(file).name}:{line})" for file, line, function in chosen[::-1][:depth]]


def _blocks(stack: str) -> list[list[tuple[str, ...]]]:
    """Return file, line and function of the frames of each thread, then of each task, outermost first."""
    current: list[tuple[str, ...]] = []
    threads, tasks = [current], list[list[tuple[str, ...]]]()
    for line in stack.splitlines():
        if _HEADER.match(line):
            current = []
            (tasks if line.startswith("task ") else threads).append(current)
        elif matched := _FRAME.match(line):
            current.append(matched.groups())
    if "recent call first" in stack:
        threads = [frames[::-1] for frames in threads]
    return [*threads, *tasks]
