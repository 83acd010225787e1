"""Load of a run's machine in one line: processors, memory, GPUs."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from rl_core.gpus import open_driver
from rl_metrics.reductions.memory import PROC, memory_metrics, memory_of

EVERY_S = 3.0


class ResourceWatch:
    """Measures the machine's load every few seconds in a thread, because a GPU's driver may be slow.

    Attributes:
        text: Newest measurement, such as "CPU 87 %  memory 3.2/7.6 GiB (run 2.1)"; "" before the first.
    """

    def __init__(self, *, proc: Path = PROC) -> None:
        """Create a watch without starting it."""
        self.text = ""
        self._proc = proc
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
        driver = open_driver()
        cards = [] if driver is None else driver.read_all()
        if not cards:
            return ""
        name = "GPU" if len(cards) == 1 else f"{len(cards)} GPUs"
        busy = sum(card.utilization for card in cards) / len(cards)
        used, total = (
            sum(sizes) / 2**30 for sizes in zip(*((c.used_bytes, c.total_bytes) for c in cards), strict=True)
        )
        return f"{name} {100 * busy:.0f} %, {used:.1f}/{total:.0f} GiB"
