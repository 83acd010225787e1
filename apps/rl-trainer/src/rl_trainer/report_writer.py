"""report.html: written while a run goes on, and at its end, by a process beside it."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from rl_metrics.generations import GenerationSample
from rl_metrics.histogram import Histogram

log = structlog.get_logger(__name__)

LAST_REPORT_S = 120.0
"""Longest wait for the report at the end of a run."""

MESSAGE_LENGTH = 500
"""Characters that are told of what a report said when it failed."""


class ReportWriter:
    """A tracker that has `rl-metrics report` write the run's page; it costs the run the start of a process.

    A report that fails is warned of and stops nothing; one that is still being written when the next is due is
    waited for by leaving that out.
    """

    def __init__(self, folder: Path, *, every: int, is_last_written: bool = True) -> None:
        """Name the run.

        Args:
            folder: The run's.
            every: Steps between two reports; 0 writes none while the run goes on.
            is_last_written: Write one at the end.
        """
        self._folder = folder
        self._every = every
        self._is_last_written = is_last_written
        self._running: subprocess.Popen[bytes] | None = None
        self._has_steps = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - it reads the files
        """Begin a report where one is due and none is being written."""
        self._has_steps = True
        if self._every and step and step % self._every == 0 and self._is_idle():
            self._running = self._start()

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing is due."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Nothing is due."""

    def log_generations(self, step: int, name: str, samples: Sequence[GenerationSample]) -> None:
        """Nothing is due."""

    def close(self) -> None:
        """Write the last report, and wait for it. Can be called twice."""
        self._wait()
        if self._is_last_written and self._has_steps:
            self._has_steps = False
            self._running = self._start()
            self._wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-m", "rl_metrics", "report", str(self._folder)]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)  # noqa: S603 - our own

    def _is_idle(self) -> bool:
        if self._running is not None and self._running.poll() is None:
            return False
        self._wait()
        return True

    def _wait(self) -> None:
        """Wait for the report that is being written, and tell how it failed where it did."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            _, said = running.communicate(timeout=LAST_REPORT_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            said = f"it took more than {LAST_REPORT_S:g} s".encode()
        if running.returncode:
            error = said.decode(errors="replace").strip()[-MESSAGE_LENGTH:]
            log.warning("report_failed", error=error, again=f"rl-metrics report {self._folder}")
