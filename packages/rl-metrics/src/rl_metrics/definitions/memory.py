"""Metrics of memory by owner."""

from rl_metrics.definitions.definition import Metric, Reduction
from rl_metrics.definitions.entries import one

GPU_OWNERS = {
    "perf": "the learner's ranks, which also hold the reference and the critic",
    "engine": "the engines",
    "teacher": "the teachers",
}
"""Prefixes of metrics about GPUs, and whose GPUs these are."""


def _gpu_metrics(owner: str, whose: str) -> tuple[Metric, ...]:
    """Return the metrics of an owner's GPUs: over all of them, and of each one if there are several."""
    figures = (
        ("max_memory_allocated_gb", "GiB", "Peak memory of torch's tensors in the step", "the largest"),
        ("max_memory_reserved_gb", "GiB", "Peak memory that torch reserved in the step", "the largest"),
        ("memory_total_gb", "GiB", "Memory of a card", "the smallest"),
        (
            "gpu_utilization",
            "1",
            "Share of the step in which a card ran a kernel, of any process (needs nvidia-ml-py)",
            "mean",
        ),
    )
    over_all = tuple(
        one(f"{owner}/{name}", unit, f"{meaning}, {how} over the GPUs of {whose}.", reduction=_REDUCTIONS[how])
        for name, unit, meaning, how in figures
    )
    of_each = tuple(
        one(f"{owner}/gpu/{{n}}/{name}", unit, f"{meaning}, on GPU {{n}} of {whose}; only if there are several.")
        for name, unit, meaning, _ in figures
    )
    return over_all + of_each


_REDUCTIONS: dict[str, Reduction] = {"the largest": "max", "the smallest": "min", "mean": "last"}

MEMORY = (
    one("perf/cpu_memory_used_gb", "GiB", "Memory in use on the host.", reduction="max"),
    one("perf/cpu_memory_total_gb", "GiB", "Total memory of the host.", reduction="max"),
    one("perf/process_memory_gb", "GiB", "Resident memory of the process.", reduction="max"),
    *(metric for owner, whose in GPU_OWNERS.items() for metric in _gpu_metrics(owner, whose)),
    one(
        "memory/{owner}_gb",
        "GiB",
        "Memory of a role's process (trainer, controller, rollouter, learner) without mapped files; with _children, of "
        "the processes it started; or of a known part, such as the queue's rows.",
        reduction="max",
    ),
    one(
        "memory/{owner}_python_blocks",
        "blocks",
        "Memory blocks of Python objects in a role's process. If it grows with the memory, Python objects accumulate; "
        "otherwise native code keeps the memory.",
        reduction="max",
    ),
)
