"""Metrics of memory by owner."""

from rl_metrics.definitions.entries import one

MEMORY = (
    one("perf/cpu_memory_used_gb", "GiB", "Memory in use on the host.", reduction="max"),
    one("perf/cpu_memory_total_gb", "GiB", "Memory of the host.", reduction="max"),
    one("perf/process_memory_gb", "GiB", "Resident memory of the process.", reduction="max"),
    one("perf/max_memory_allocated_gb", "GiB", "Largest memory that torch held on the device.", reduction="max"),
    one("perf/max_memory_reserved_gb", "GiB", "Largest memory that torch reserved on the device.", reduction="max"),
    one(
        "memory/{owner}_gb",
        "GiB",
        "Memory of a role's process (trainer, controller, rollouter, learner), mapped files left out; of all that it "
        "started, where the owner ends in _children; or of what is known inside, such as the queue's rows.",
        reduction="max",
    ),
    one(
        "memory/{owner}_python_blocks",
        "blocks",
        "Blocks of memory that Python has given to objects in a role's process; where it grows with the memory, Python "
        "objects are kept, else native code keeps it.",
        reduction="max",
    ),
)
