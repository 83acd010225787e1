"""Reports on runs without progress, in hang.json: who does not answer, and what each role does."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from rl_core.cluster import RoleReport
from rl_core.files import read_record, write_durably
from rl_core.record_fields import converts_arguments, record

__all__ = ["HANG_FILE", "HangReport", "describe_trouble", "write_hang_report"]

HANG_FILE = "hang.json"

_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (\S+)')
_HEADER = re.compile(r"^(thread |task |Thread 0x|Current thread 0x)")
_SERVED = "rl_core/cluster/served.py"


@record
class HangReport:
    """The report of a run without progress.

    Attributes:
        at: Time of the report, in ISO 8601.
        run: The run's folder.
        no_progress_s: Seconds since the last progress.
        last_progress: Description of the last progress.
        roles: Report of each role.
        queue: `TransferQueue.stats`; empty if the queue did not answer.
        causes: Who does not answer, or why nobody was asked; empty if all answer.
        format: Identifier of the file format.
    """

    at: str
    run: str
    no_progress_s: float
    last_progress: str = ""
    roles: tuple[RoleReport, ...] = ()
    queue: Mapping[str, float] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    format: Literal["rl-hang-2"] = "rl-hang-2"

    @property
    def summary(self) -> str:
        """The report in one sentence."""
        since = f", since: {self.last_progress}" if self.last_progress else ""
        return f"no progress for {self.no_progress_s:.0f} s{since}; {'; '.join(self.causes) or 'all roles answer'}"


def describe_trouble(roles: Sequence[RoleReport], queue: Mapping[str, float]) -> tuple[str, ...]:
    """Return which roles do not answer or do not serve, with their positions in the code.

    Args:
        roles: Report of each role.
        queue: `TransferQueue.stats`; empty if the queue did not answer.
    """
    troubles = []
    for role in roles:
        if not role.is_answering:
            frames = innermost_frames(role.stack, depth=2)
            where = f", it is in {', called by '.join(frames)}" if frames else ""
            troubles.append(f"{role.name} does not answer (for {role.since_s:.0f} s{where})")
        elif role.state != "serving":
            troubles.append(f"{role.name} is {role.state} (for {role.since_s:.0f} s)")
    return (*troubles, *(() if queue else ("the queue does not answer",)))


@converts_arguments
def write_hang_report(path: Path, report: HangReport) -> None:
    """Write a report atomically; numbers that are not finite are left out.

    Raises:
        OSError: The file cannot be written.
    """
    roles = tuple(replace(role, counts=_finite(role.counts)) for role in report.roles)
    report = replace(report, roles=roles, queue=_finite(report.queue))
    content = {"summary": report.summary, **msgspec.to_builtins(report)}
    write_durably(path, json.dumps(content, ensure_ascii=False, indent=2).encode(errors="replace") + b"\n")


def read_hang_report(path: Path) -> HangReport:
    """Read a report.

    Raises:
        DataError: The file is missing, or not such a report.
    """
    return read_record(path, HangReport)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


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
