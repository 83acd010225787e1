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
"""Lines of code that are named, those whose objects take most memory."""


@converts_arguments
def memory_metrics(proc: Path = PROC) -> dict[str, float]:
    """`perf/cpu_memory_used_gb` and `perf/process_memory_gb`; empty where there is no /proc."""
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
    """`memory/{owner}_gb` of a process and `memory/{owner}_children_gb` of all that it started; mapped files left out.

    Args:
        owner: Role of the process, such as "trainer".
        pid: The process; None is this one.
        proc: Where Linux tells.
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
    """Says every so many steps how much memory a role's process has, and what made it.

    It does not count objects by type: the garbage collector's list of them refers also to those that native code of
    another thread is making, which then finds them shared, and crashes.
    """

    def __init__(
        self, owner: str, *, say: Callable[..., None] | None = None, every: int = 5, is_traced: bool = False
    ) -> None:
        """Begin to watch.

        Args:
            owner: Role of this process, such as "trainer".
            say: Writes an event, with its name and fields; None names no lines.
            every: Steps between two measurements; 0 makes none.
            is_traced: Also name the lines of code that made what is there, with tracemalloc: exact, but everything
                that makes many objects takes up to several times as long.
        """
        self._owner = owner
        self._say = say
        self._every = every
        self._is_traced = is_traced and say is not None and every > 0
        self._num_steps = 0
        if self._is_traced and not tracemalloc.is_tracing():
            tracemalloc.start()

    def step(self, step: int | None = None) -> dict[str, float]:
        """`memory/*` of a step where it is due, the first one among them; where it traces, an event `memory_lines`.

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
    """All that a process started, and what these did."""
    found, left = set[int](), [pid]
    try:
        while left:  # reading the list of each takes a fraction of a look at every process of the host
            parent = left.pop()
            for task in (proc / str(parent) / "task").iterdir():
                words = (task / "children").read_text().split()
                new = {int(word) for word in words} - found
                found |= new
                left.extend(new)
    except OSError:  # one ended meanwhile, or this Linux has no such lists
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
