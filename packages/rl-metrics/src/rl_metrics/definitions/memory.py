"""Metrics of memory by owner."""

from rl_metrics.definitions.entries import one

MEMORY = (
    one("perf/cpu_memory_used_gb", "GiB", "Memory in use on the host.", reduction="max"),
    one("perf/cpu_memory_total_gb", "GiB", "Total memory of the host.", reduction="max"),
    one("perf/process_memory_gb", "GiB", "Resident memory of the process.", reduction="max"),
    one("perf/max_memory_allocated_gb", "GiB", "Peak memory allocated by torch on the device.", reduction="max"),
    one("perf/max_memory_reserved_gb", "GiB", "Peak memory reserved by torch on the device.", reduction="max"),
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
