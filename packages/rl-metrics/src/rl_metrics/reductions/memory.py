"""Memory of host and processes by owner, from Linux's /proc."""

import os
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

from rl_core.cluster.processes.guard import descendants
from rl_core.record_fields import converts_arguments

KIB_PER_GIB = 1024**2
PROC = Path("/proc")

MOST_LINES = 20
"""Number of reported lines of code, largest memory first."""


@converts_arguments
def memory_metrics(proc: Path = PROC) -> dict[str, float]:
    """Return `perf/cpu_memory_{used,total}_gb` and `perf/process_memory_gb`; empty without /proc."""
    host = _sizes_kib(proc / "meminfo")
    process = _sizes_kib(proc / "self" / "status")
    metrics: dict[str, float] = {}
    if "MemTotal" in host and "MemAvailable" in host:
        metrics["perf/cpu_memory_used_gb"] = (host["MemTotal"] - host["MemAvailable"]) / KIB_PER_GIB
        metrics["perf/cpu_memory_total_gb"] = host["MemTotal"] / KIB_PER_GIB
    if "VmRSS" in process:
        metrics["perf/process_memory_gb"] = process["VmRSS"] / KIB_PER_GIB
    return metrics


def memory_of(owner: str, *, pid: int | None = None, proc: Path = PROC) -> dict[str, float]:
    """Return `memory/{owner}_gb` of a process and `memory/{owner}_children_gb` of its descendants.

    Mapped files are excluded.

    Args:
        owner: Role of the process, such as "trainer".
        pid: Id of the process; None uses this one.
        proc: Folder of Linux's process files.
    """
    pid = os.getpid() if pid is None else pid
    own = _own_kib(proc, pid)
    if own is None:
        return {}
    metrics = {f"memory/{owner}_gb": own / KIB_PER_GIB}
    children = [size for child in _all_children(proc, pid) if (size := _own_kib(proc, child)) is not None]
    if children:
        metrics[f"memory/{owner}_children_gb"] = sum(children) / KIB_PER_GIB
    return metrics


class MemoryWatch:
    """Measures the memory of a role's process every few steps, and optionally the lines of code that allocated it.

    It does not count objects by type: the garbage collector's list also refers to objects that native code of another
    thread is creating, which then finds them shared and crashes.
    """

    def __init__(
        self, owner: str, *, say: Callable[..., None] | None = None, every: int = 5, is_traced: bool = False
    ) -> None:
        """Start to measure.

        Args:
            owner: Role of this process, such as "trainer".
            say: Writes an event with a name and fields; None reports no lines of code.
            every: Steps between measurements; 0 disables them.
            is_traced: Also report the lines of code that allocated the memory, with tracemalloc. This is exact, but
                slows code that creates many objects up to several times.
        """
        self._owner = owner
        self._say = say
        self._every = every
        self._is_traced = is_traced and say is not None and every > 0
        self._num_steps = 0
        if self._is_traced and not tracemalloc.is_tracing():
            tracemalloc.start()

    def step(self, step: int | None = None) -> dict[str, float]:
        """Return `memory/*` if the step is due, as the first is; with tracing, also write a `memory_lines` event.

        Args:
            step: Step number; None if the caller adds it to the event.
        """
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._every or number % self._every:
            return {}
        if self._say is not None and self._is_traced:
            place = {} if step is None else {"step": step}
            self._say("memory_lines", **place, role=self._owner, lines=_traced_lines())
        return {**memory_of(self._owner), f"memory/{self._owner}_python_blocks": float(sys.getallocatedblocks())}


def _traced_lines() -> list[dict[str, str | int]]:
    statistics = tracemalloc.take_snapshot().statistics("lineno")[:MOST_LINES]
    return [
        {
            "line": f"{one.traceback[0].filename}:{one.traceback[0].lineno}",
            "size_bytes": one.size,
            "count": one.count,
        }
        for one in statistics
    ]


def _all_children(proc: Path, pid: int) -> Iterable[int]:
    """Return all descendants of a process."""
    found, left = set[int](), [pid]
    try:
        while left:  # reading these lists is much faster than scanning all processes of the host
            parent = left.pop()
            for task in (proc / str(parent) / "task").iterdir():
                words = (task / "children").read_text().split()
                new = {int(word) for word in words} - found
                found |= new
                left.extend(new)
    except OSError:  # a process ended meanwhile, or this Linux has no such lists
        return [child for child, _ in descendants(pid)]
    return found


def _own_kib(proc: Path, pid: int) -> int | None:
    sizes = _sizes_kib(proc / str(pid) / "status")
    if "RssAnon" in sizes:
        return sizes["RssAnon"] + sizes.get("RssShmem", 0)
    return sizes.get("VmRSS")


def _sizes_kib(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) for row in fields if len(row) == 3 and row[2] == "kB"}
