"""The console and the trackers that the settings select, and the one that writes report.html."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from rl_core.secret_settings import resolve_secrets
from rl_metrics.trackers import (
    BackgroundTracker,
    ConsoleTracker,
    Ending,
    Fanout,
    JsonlTracker,
    MlflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from rl_trainer_parts.settings.fields import plain_settings
from rl_trainer_parts.settings.schema import Settings

log = structlog.get_logger(__name__)

REPORT_S = 120.0
"""Maximum time for one report."""

MESSAGE_LENGTH = 500
"""Number of characters of a failed report's output to show."""


class ReportWriter(Tracker):
    """Tracker that runs `rl-metrics report` in a separate process.

    It ignores late metrics, samples and histograms, which the next report reads. A report that fails causes a warning
    and never stops the run. Only one report is written at a time.
    """

    def __init__(self, folder: Path, *, every: int) -> None:
        """Set the run folder and the interval.

        Args:
            folder: The run's folder.
            every: Steps between two reports; 0 writes one only at the end.
        """
        self._folder = folder
        self._every = every
        self._running: subprocess.Popen[bytes] | None = None
        self._ends_at = 0.0
        self._has_steps = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - the report reads the files
        """Start a report if one is due."""
        self._has_steps = True
        if self._every and step and step % self._every == 0 and self._is_idle():
            self._start()

    def close(self) -> None:
        """Write the final report and wait for it. Can be called twice."""
        running, self._running = self._running, None
        if running is not None:  # its content would be outdated
            running.kill()
            running.communicate()
        if self._has_steps:
            self._has_steps = False
            self._start()
            self._finish(self._ends_at - time.monotonic())

    def _start(self) -> None:
        words = [sys.executable, "-m", "rl_metrics", "report", str(self._folder)]
        nothing = subprocess.DEVNULL
        self._ends_at = time.monotonic() + REPORT_S
        self._running = subprocess.Popen(  # noqa: S603 - our own module
            words,
            stdin=nothing,
            stdout=nothing,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not reach it
        )

    def _is_idle(self) -> bool:
        """True if no report is being written, or the running one takes too long."""
        if self._running is not None:
            if self._running.poll() is None and time.monotonic() < self._ends_at:
                return False
            self._finish(0.0)
        return True

    def _finish(self, timeout_s: float) -> None:
        """Wait for the running report, and warn if it failed."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            _, said = running.communicate(timeout=max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            said = f"it took more than {REPORT_S:g} s".encode()
        if running.returncode:
            error = said.decode(errors="replace").strip()[-MESSAGE_LENGTH:]
            log.warning("report_failed", error=error, again=f"rl-metrics report {self._folder}")


def make_console(settings: Settings) -> ConsoleTracker:
    """The console that `metrics.console` selects; by default a live display in a terminal, plain lines elsewhere."""
    return ConsoleTracker(
        kind=settings.metrics.console,
        hidden=settings.zero_metrics,
        generations_in="generations.jsonl and the report" if settings.metrics.report else "generations.jsonl",
    )


def make_trackers(
    settings: Settings, folder: Path, console: ConsoleTracker, *, ending: Callable[[], Ending] = lambda: "finished"
) -> Fanout:
    """metrics.jsonl, the console, and the trackers in `metrics.trackers`.

    Args:
        settings: The run's settings.
        folder: The run's folder.
        console: Shows progress.
        ending: Returns how the run ended, when the trackers are closed.

    Raises:
        MissingExtraError: A tracker's library is not installed.
        SettingsError: A tracker cannot start.
    """
    trackers: dict[str, Tracker] = {}
    if settings.metrics.report:
        trackers["report"] = ReportWriter(folder, every=settings.metrics.report_every)  # the first is closed last
    trackers |= {"jsonl": JsonlTracker(folder / "metrics.jsonl"), "console": console}
    metrics, name = settings.metrics, settings.run.name
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(folder / "tensorboard"),
        "wandb": lambda: WandbTracker(
            folder, project=metrics.wandb_project, name=name, config=plain_settings(settings)
        ),
        "mlflow": lambda: MlflowTracker(
            folder,
            experiment=metrics.mlflow_experiment,
            name=name,
            uri=resolve_secrets(metrics.mlflow_uri, where="metrics.mlflow_uri"),
            config=plain_settings(settings),
            ending=ending,
        ),
    }
    trackers |= {chosen: BackgroundTracker(makers[chosen](), name=chosen) for chosen in metrics.trackers}
    return Fanout(trackers, kept=("jsonl",))
