"""Steps of every launch in both trainers: find the checkpoint to resume from, and report how the run ended."""

import _thread
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import CheckpointError
from rl_distill.checkpoints import CheckpointStore, Saved
from rl_metrics.run_files import EventLog
from rl_metrics.trackers import ConsoleTracker, Ending
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.learning.objective import method_title
from rl_trainer_parts.reporting.failed_sessions import EVENT, failures_line
from rl_trainer_parts.reporting.health import HealthWatch
from rl_trainer_parts.reporting.rollout_rows import RolloutWriter
from rl_trainer_parts.reporting.token_probes import TokenProbes
from rl_trainer_parts.reporting.trackers import make_trackers
from rl_trainer_parts.run.folder import RunFolder, RunState
from rl_trainer_parts.run.goal import Goal
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal
from rl_trainer_parts.settings.schema import Settings

log = structlog.get_logger(__name__)


class RunLifecycle:
    """One launch of a run, in a folder that this process has locked.

    Attributes:
        console: Shows what users should see.
        events: Logs everything.
        trackers: Receive the metrics.
        rollouts: Records trajectories.
        probes: Probes the policy at fixed tokens.
        store: The run's checkpoints.
        goal: The run's validations, and what they decide.
        ending: The run's end in the trackers' terms.
        is_ending: True when training has finished.
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, console: ConsoleTracker, tokenizer: PromptTokenizer
    ) -> None:
        """Open the run's files and start its clock.

        Args:
            settings: The run's settings.
            folder: The run's folder.
            console: Shows what users should see.
            tokenizer: The policy's tokenizer.
        """
        self._settings = settings
        self._folder = folder
        self.console = console
        self._started = time.perf_counter()
        self._earlier_wall_s = 0.0
        self.ending: Ending = "failed"  # until the run ends otherwise
        self.is_ending = False
        self._has_begun = False
        self.events = EventLog(folder.path / "events.jsonl")
        self.trackers = make_trackers(settings, folder.path, console, ending=lambda: self.ending)
        self.rollouts = RolloutWriter(folder.path / "rollouts.jsonl", tokenizer)
        self.probes = TokenProbes.of_run(settings, folder.path, tokenizer)
        self.goal = Goal(settings.trainer)
        keep = settings.trainer.keep_checkpoints
        self.store = CheckpointStore(folder.checkpoints, keep=keep, on_saved=self.say_saved)

    async def launch(
        self, train: Callable[[AsyncExitStack, StopSignal], Awaitable[None]], state: Callable[[], RunState]
    ) -> int:
        """Train until the last step or a signal; an error leaves the folder as of the last checkpoint.

        Returns the exit status: 0 after the last step, 130 or 143 if the user stopped it, 3 if it paused itself.

        Args:
            train: Trains; the stack closes what it opens.
            state: Returns the state after the last finished step.

        Raises:
            Exception: Whatever `train` raised, except a requested stop.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self.events.close)
            stack.enter_context(self.events.copying_warnings())
            stack.callback(self.trackers.close)
            stack.callback(self.rollouts.close)
            stop = stack.enter_context(StopSignal(self._say_stopping))
            self._watch_health(stop)
            self.events.write("run_started", settings=str(self._folder.path / "settings.toml"))
            parts = await stack.enter_async_context(AsyncExitStack())
            try:
                await train(parts, stop)
            except StopRequestedError:
                status = self._stopped(state(), stop)
            except BaseException as error:
                with suppress(Exception):  # its error is not why the run failed
                    self.store.close()
                self.events.write("run_failed", error=f"{type(error).__name__}: {error}", step=state().step)
                raise
            else:
                status = self._finished(state())
            self.is_ending = True
            with self.console.phase("stopping engines, learner and roles", is_brief=True):
                await parts.aclose()
            return status

    def _watch_health(self, stop: StopSignal) -> None:
        """Add the health tracker, if the settings enable it."""
        events, folder = self.events, self._folder.path
        try:
            if self._settings.health.enabled:
                watch = HealthWatch(self._settings, folder, console=self.console, events=events, pause=stop.pause)
                self.trackers.add("health", watch)
        except OSError as error:  # a run without health checks is better than no run
            log.warning("health_failed", error=str(error))

    @property
    def wall_s(self) -> float:
        """Seconds so far, over all launches."""
        return self._earlier_wall_s + self.launch_s

    @property
    def launch_s(self) -> float:
        """Seconds since this launch began."""
        return time.perf_counter() - self._started

    def say(self, event: str, /, **fields: Any) -> None:
        """Log an event; failed sessions are also shown on the console."""
        self.events.write(event, **fields)
        if event == EVENT:
            self.console.say(failures_line(fields), style="yellow")

    def say_saved(self, saved: Saved) -> None:
        """Log a complete checkpoint."""
        self.say("checkpoint_saved", step=saved.step, folder=str(saved.folder), took_s=round(saved.took_s, 3))

    def find_checkpoint(self) -> Path | None:
        """The newest whole checkpoint; broken ones are reported and skipped."""

        def passed_over(error: CheckpointError) -> None:
            self.console.say(f"skipping a broken checkpoint: {error}", style="yellow")
            self.events.write("checkpoint_broken", error=str(error))

        return self.store.newest(passed_over)

    def resumes(self, checkpoint: Path, state: RunState) -> None:
        """Report where the run resumes."""
        self.console.say(f"resuming from {checkpoint}")
        self.events.write("run_resumed", checkpoint=str(checkpoint))
        self._earlier_wall_s = state.wall_s
        self.goal.restore(self._folder.path, state.step)

    def says_done(self, state: RunState) -> bool:
        """Whether a resumed run has nothing left to train; if so, report why and how to continue."""
        reason = self.goal.stop_reason
        if state.step >= self._settings.trainer.steps:
            self.console.say(f"all {state.step} steps are done; to continue, raise trainer.steps")
        elif reason is not None:
            setting = reason.partition(":")[0]
            self.console.say(f"the run has ended at step {state.step}. {reason}; to continue, change {setting}")
        else:
            return False
        return True

    def begins(self, state: RunState, *, title: str | None = None) -> None:
        """Report what is trained, by default the method of the settings, and from which step."""
        self._has_begun = True
        total = self._settings.trainer.steps
        self.console.begin(title or method_title(self._settings), total_steps=total, done_steps=state.step)

    def _say_stopping(self) -> None:
        """Report at once, whatever the main thread is doing, what the stop waits for and what happens next."""
        saved = ("saving a checkpoint of the last finished step",) if self._has_begun else ()
        parts = "; ".join((*self.console.running(), *saved, "stopping engines, learner and roles"))
        said = f"stopping: {parts}. Ctrl-C again exits at once without saving."
        # A new thread, because the console and threading.Thread need locks that the interrupted main thread may hold.
        _thread.start_new_thread(self.console.say, (said,), {"style": "bold yellow"})

    def _stopped(self, state: RunState, stop: StopSignal) -> int:
        """The user stopped the run, or it paused itself."""
        self.ending = "stopped"
        status, paused = ("paused", {"paused_by": stop.pause_reason}) if stop.is_paused else ("stopped", {})
        self._folder.write_summary(self._summary(status, state) | paused)
        self.events.write("run_stopped", step=state.step, signal=None if paused else stop.number, **paused)
        by = f" by {stop.pause_reason}" if paused else ""
        self.console.end()
        self.console.say(f"{status} after step {state.step}{by}; continue with --resume", style="bold yellow")
        return stop.exit_status

    def _finished(self, state: RunState) -> int:
        """The last step is finished."""
        self.ending = "finished"
        reason = self.goal.stop_reason if state.step < self._settings.trainer.steps else None
        summary = self._summary("finished", state) | ({} if reason is None else {"stopped_by": reason})
        file = self._folder.write_summary(summary)
        self.events.write("run_finished", **summary)
        shown = {name: value for name, value in summary.items() if value is not None and name != "status"}
        files = {"metrics": self._folder.path / "metrics.jsonl", "summary": file}
        if self._settings.metrics.report:
            files["report"] = self._folder.path / "report.html"
        self.console.summary(
            "run finished",
            {**shown, **files},
            notes={"steps_wall_s": "(time in steps; samples_per_s is num_samples divided by it)"},
        )
        return 0

    def _summary(self, status: str, state: RunState) -> dict[str, Any]:
        files = {step: str(self._folder.checkpoints / f"step_{step}") for step in self.store.steps()}
        best = self.goal.best
        return {
            "status": status,
            "steps": state.step,
            "wall_s": round(self.wall_s, 2),
            "steps_wall_s": round(state.steps_wall_s, 2),
            "samples_per_s": round(state.num_samples / state.steps_wall_s, 2) if state.steps_wall_s else 0.0,
            **state.results,
            "num_samples": state.num_samples,
            "policy_version": state.policy_version,
            "seed": self._settings.run.seed,
            "checkpoint": next(reversed(files.values()), None),
            **self.goal.summary(),
            **({"best_checkpoint": files[best.step]} if best is not None and best.step in files else {}),
        }
