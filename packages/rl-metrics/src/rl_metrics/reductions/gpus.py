"""Metrics of GPUs, from what learner, engines and teachers measured."""

from collections.abc import Sequence
from dataclasses import asdict

from rl_core.gpus import GpuUse


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
