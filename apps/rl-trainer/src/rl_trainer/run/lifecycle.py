"""What every launch of a run does, whichever trainer makes it: find where to go on, and tell how it ended."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_core.errors import CheckpointError
from rl_distill.checkpoints.store import CheckpointStore
from rl_metrics.run_files.events import EventLog
from rl_metrics.trackers.console import ConsoleTracker
from rl_metrics.trackers.protocol import Ending
from rl_trainer.run.folder import RunFolder
from rl_trainer.run.stopping import StopSignal
from rl_trainer.settings.schema import Settings


class RunProgress(Protocol):
    """What a trainer's state says of a run.

    Attributes:
        step: Last finished step.
        policy_version: Version of its weights.
        num_samples: Trajectories trained on.
        wall_s: Seconds spent so far, over all launches.
        steps_wall_s: Seconds of the training steps alone.
        results: Validation results by name, such as "validation_accuracy_first".
    """

    @property
    def step(self) -> int: ...  # noqa: D102 - above
    @property
    def policy_version(self) -> int: ...  # noqa: D102
    @property
    def num_samples(self) -> int: ...  # noqa: D102
    @property
    def wall_s(self) -> float: ...  # noqa: D102
    @property
    def steps_wall_s(self) -> float: ...  # noqa: D102
    @property
    def results(self) -> Mapping[str, float]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended.

    Attributes:
        exit_status: 0 when the last step was done, 130 or 143 when the user stopped it, 3 when it paused itself.
        summary: What `summary.json` says.
    """

    exit_status: int
    summary: Mapping[str, Any]


class RunLifecycle:
    """One launch of a run, in a folder that this process holds.

    Attributes:
        ending: How trackers call its end.
    """

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        *,
        console: ConsoleTracker,
        events: EventLog,
        store: CheckpointStore,
    ) -> None:
        """Begin to count its time.

        Args:
            settings: Of the run.
            folder: Of the run.
            console: Told what users should see.
            events: Told everything.
            store: Has the run's checkpoints.
        """
        self._settings = settings
        self._folder = folder
        self._console = console
        self._events = events
        self._store = store
        self._started = time.perf_counter()
        self._earlier_wall_s = 0.0
        self.ending: Ending = "failed"  # what ends otherwise says so

    @property
    def wall_s(self) -> float:
        """Seconds spent so far, over all launches."""
        return self._earlier_wall_s + time.perf_counter() - self._started

    def find_checkpoint(self) -> Path | None:
        """The newest whole checkpoint; broken ones are passed over, and told."""

        def passed_over(error: CheckpointError) -> None:
            self._console.say(f"passing over a broken checkpoint: {error}")
            self._events.write("checkpoint_broken", error=str(error))

        return self._store.newest(passed_over)

    def resumes(self, checkpoint: Path, state: RunProgress) -> None:
        """Say where it goes on."""
        self._console.say(f"resuming from {checkpoint}")
        self._events.write("run_resumed", checkpoint=str(checkpoint))
        self._earlier_wall_s = state.wall_s

    def stopped(self, state: RunProgress, stop: StopSignal) -> Outcome:
        """The user stopped it, or it paused itself."""
        self.ending = "stopped"
        if stop.is_paused:
            return self._paused(state, stop)
        summary = self._summary("stopped", state)
        self._folder.write_summary(summary)
        self._events.write("run_stopped", step=state.step, signal=stop.number)
        self._console.say(f"stopped after step {state.step}; go on with --resume")
        return Outcome(exit_status=stop.exit_status, summary=summary)

    def _paused(self, state: RunProgress, stop: StopSignal) -> Outcome:
        summary = self._summary("paused", state) | {"paused_by": stop.pause_reason}
        self._folder.write_summary(summary)
        self._events.write("run_stopped", step=state.step, signal=None, paused_by=stop.pause_reason)
        self._console.say(f"paused after step {state.step} by {stop.pause_reason}; go on with --resume")
        return Outcome(exit_status=stop.exit_status, summary=summary)

    def failed(self, state: RunProgress, error: BaseException) -> None:
        """An error ended it."""
        self._events.write("run_failed", error=f"{type(error).__name__}: {error}", step=state.step)

    def _report(self) -> dict[str, Path]:
        """Where the page about the run will be."""
        return {"report": self._folder.path / "report.html"} if self._settings.metrics.report else {}

    def finished(self, state: RunProgress) -> Outcome:
        """The last step was done."""
        self.ending = "finished"
        summary = self._summary("finished", state)
        file = self._folder.write_summary(summary)
        self._events.write("run_finished", **summary)
        shown = {name: value for name, value in summary.items() if value is not None and name != "status"}
        self._console.summary(
            "run finished", {**shown, "metrics": self._folder.path / "metrics.jsonl", "summary": file, **self._report()}
        )
        return Outcome(exit_status=0, summary=summary)

    def _summary(self, status: str, state: RunProgress) -> dict[str, Any]:
        newest = self._store.steps()[-1:]
        return {
            "status": status,
            "steps": state.step,
            "wall_s": round(self.wall_s, 2),
            "samples_per_s": round(state.num_samples / state.steps_wall_s, 2) if state.steps_wall_s else 0.0,
            "validation_accuracy_first": state.results.get("validation_accuracy_first"),
            "validation_accuracy_last": state.results.get("validation_accuracy_last"),
            "test_accuracy_first": state.results.get("test_accuracy_first"),
            "test_accuracy_last": state.results.get("test_accuracy_last"),
            "num_samples": state.num_samples,
            "policy_version": state.policy_version,
            "seed": self._settings.run.seed,
            "checkpoint": str(self._folder.checkpoints / f"step_{newest[0]}") if newest else None,
        }
