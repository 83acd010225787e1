"""Memory of host and process, as Linux tells it."""

from pathlib import Path

KIB_PER_GIB = 1024**2


def memory_metrics(proc: Path = Path("/proc")) -> dict[str, float]:
    """`perf/cpu_memory_used_gb` and `perf/process_memory_gb`; empty where there is no /proc."""
    host = _sizes_kib(proc / "meminfo")
    process = _sizes_kib(proc / "self" / "status")
    metrics: dict[str, float] = {}
    if "MemTotal" in host and "MemAvailable" in host:
        metrics["perf/cpu_memory_used_gb"] = (host["MemTotal"] - host["MemAvailable"]) / KIB_PER_GIB
    if "VmRSS" in process:
        metrics["perf/process_memory_gb"] = process["VmRSS"] / KIB_PER_GIB
    return metrics


def _sizes_kib(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) for row in fields if len(row) == 3 and row[2] == "kB"}
