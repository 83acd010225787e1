"""Load of a run's machine in one line: processors, memory, GPUs."""

import os
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from rl_metrics.reductions.memory import PROC, memory_metrics, memory_of

EVERY_S = 3.0
GPU_DEADLINE_S = 10.0
GPU_QUERY = ("--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


class ResourceWatch:
    """Measures the machine's load every few seconds in a thread, because a GPU's driver may be slow.

    Attributes:
        text: Newest measurement, such as "CPU 87 %  memory 3.2/7.6 GiB (run 2.1)"; "" before the first.
    """

    def __init__(self, *, proc: Path = PROC) -> None:
        """Create a watch without starting it."""
        self.text = ""
        self._proc = proc
        self._nvidia_smi = shutil.which("nvidia-smi")
        self._cpu = (0, 0)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="console-resources", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop measuring; the thread ends by itself."""
        self._is_over.set()

    def look(self) -> str:
        """Return the current load; for processors, since the previous call."""
        return "  ".join(filter(None, (self._processors(), self._memory(), self._gpus())))

    def _work(self) -> None:
        while True:
            with suppress(OSError, ValueError, IndexError):
                self.text = self.look()
            if self._is_over.wait(EVERY_S):
                return

    def _processors(self) -> str:
        ticks = [int(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, total = ticks[3] + ticks[4], sum(ticks)
        (idle_before, total_before), self._cpu = self._cpu, (idle, total)
        if not total_before or total == total_before:
            return ""
        return f"CPU {100 * (1 - (idle - idle_before) / (total - total_before)):.0f} % of {os.cpu_count()}"

    def _memory(self) -> str:
        host = memory_metrics(self._proc)
        if "perf/cpu_memory_used_gb" not in host:
            return ""
        run = sum(memory_of("run", proc=self._proc).values())
        used, total = host["perf/cpu_memory_used_gb"], host["perf/cpu_memory_total_gb"]
        return f"memory {used:.1f}/{total:.1f} GiB (run {run:.1f})"

    def _gpus(self) -> str:
        if self._nvidia_smi is None:
            return ""
        try:
            done = subprocess.run(  # noqa: S603 - the driver's own program
                [self._nvidia_smi, *GPU_QUERY], capture_output=True, text=True, timeout=GPU_DEADLINE_S, check=True
            )
            rows = [[float(cell) for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
            busy, used, total = (sum(column) for column in zip(*rows, strict=True))
        except (OSError, ValueError, subprocess.SubprocessError):  # no driver, or a device that does not report it
            self._nvidia_smi = None
            return ""
        name = "GPU" if len(rows) == 1 else f"{len(rows)} GPUs"
        return f"{name} {busy / len(rows):.0f} %, {used / 1024:.1f}/{total / 1024:.0f} GiB"
