"""Metrics of the hardware: memory by owner, from Linux's /proc, GPUs, and use of the devices' time."""

import os
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rl_core.cluster.processes.guard import descendants
from rl_core.errors import SettingsError
from rl_core.gpus import GpuUse
from rl_core.record_fields import converts_arguments
from rl_metrics.definitions.timing import ROLES, TOKEN_PHASES

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
        self._say = say if is_traced and every > 0 else None
        self._every = every
        self._num_steps = 0
        if self._say is not None:
            tracemalloc.start()

    def step(self, step: int | None = None) -> dict[str, float]:
        """Return `memory/*` if the step is due, as the first is; with tracing, also write a `memory_lines` event.

        Args:
            step: Step number; None if the caller adds it to the event.
        """
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._every or number % self._every:
            return {}
        if self._say is not None:
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


def summarize_gpus(owner: str, uses: Sequence[GpuUse]) -> dict[str, float]:
    """Return an owner's peak memory, card size and utilization over its GPUs, and of each one if there are several.

    Args:
        owner: Prefix of the metrics: `perf` for the learner, `engine` or `teacher`.
        uses: Use of each GPU in the step.
    """
    if not uses:
        return {}
    metrics = {
        f"{owner}/max_memory_allocated_gb": max(one.max_memory_allocated_gb for one in uses),
        f"{owner}/max_memory_reserved_gb": max(one.max_memory_reserved_gb for one in uses),
        f"{owner}/memory_total_gb": min(one.memory_total_gb for one in uses),
    }
    busy = [one.gpu_utilization for one in uses if one.gpu_utilization is not None]
    if busy:
        metrics[f"{owner}/gpu_utilization"] = sum(busy) / len(busy)
    if len(uses) > 1:
        for n, one in enumerate(uses):
            metrics |= {f"{owner}/gpu/{n}/{name}": value for name, value in asdict(one).items() if value is not None}
    return metrics


def per_token_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `timing_per_token_ms/{phase}` for each phase with `timing_s/{phase}` and a token count in the metrics.

    Args:
        metrics: Reduced metrics of a step. `perf/total_num_tokens` counts all tokens, `response_length/mean` times
            `rollout/num_trajectories` those of the responses.
    """
    num_tokens = metrics.get("perf/total_num_tokens", 0.0)
    num_response_tokens = metrics.get("response_length/mean", 0.0) * metrics.get("rollout/num_trajectories", 0.0)
    counts = {"gen": num_response_tokens} | dict.fromkeys(TOKEN_PHASES, num_tokens)
    return {
        f"timing_per_token_ms/{phase}": 1000.0 * metrics[f"timing_s/{phase}"] / count
        for phase, count in counts.items()
        if count > 0 and f"timing_s/{phase}" in metrics
    }


def model_flops_utilization(
    metrics: Mapping[str, float], *, flops: Mapping[str, float], peak_tflops: float, num_devices: int = 1
) -> dict[str, float]:
    """Return `perf/mfu/{role}`, the model's FLOPs over the devices' peak FLOPs in the same time.

    Args:
        metrics: Reduced metrics of a step, with `timing_s/{phase}`.
        flops: FLOPs of the step by role of `ROLES`; a role that trains needs those of 3 forward passes.
        peak_tflops: Peak of one device, in 10**12 FLOPs per second.
        num_devices: Number of devices that share the work.

    Raises:
        SettingsError: peak_tflops or num_devices is not above 0.
    """
    if not (peak_tflops > 0 and num_devices > 0):
        raise SettingsError(
            f"peak_tflops and num_devices must be above 0; found {peak_tflops} and {num_devices}. Use the dense "
            "peak of the dtype from the device's data sheet."
        )
    peak = peak_tflops * 1e12 * num_devices
    seconds = {role: metrics.get(f"timing_s/{ROLES[role]}", 0.0) for role in flops}
    return {f"perf/mfu/{role}": flops[role] / taken / peak for role, taken in seconds.items() if taken > 0}
