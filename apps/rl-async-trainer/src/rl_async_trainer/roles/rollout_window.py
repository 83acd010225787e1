"""What a rollouter did since it was last asked: metrics of sessions, events, and what it waits for."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rl_core.data.records import Trajectory
from rl_metrics.reductions.async_training import summarize_processing_times
from rl_metrics.reductions.distributions import timing_distributions
from rl_metrics.reductions.recorder import Recorder
from rl_metrics.reductions.rollouts import summarize_components, summarize_timings
from rl_rollout.engines.engine_load import EngineLoad
from rl_rollout.rollout import GroupResult
from rl_trainer.reporting.step_metrics import slowest_session


class RolloutWindow:
    """Gathers what happened between two steps of the learner.

    Attributes:
        version: Policy version that the engines serve.
        cached: uids of groups that came from the skip cache, and have not settled.
        made_up: Groups that a filter had refused, and that train all the same.
    """

    def __init__(self) -> None:
        """Begin the first window."""
        self.version = -1
        self._events: list[dict[str, Any]] = []
        self._waits: dict[int, tuple[str, str, float]] = {}
        self._num_waits = 0
        self._last_loads: dict[int, tuple[float, float, int]] = {}
        self.cached: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._trajectories: list[Trajectory] = []
        self._took_s: list[float] = []
        self._counts = {"failed_sessions": 0, "audited_sessions": 0, "audit_failures": 0, "refused_groups": 0}
        self._num_groups = 0
        self._num_replayed = 0
        self.made_up = 0

    def say(self, event: str, /, **fields: Any) -> None:
        """Take an event, for the run's log."""
        self._events.append({"event": event, **fields})

    def add(self, group: GroupResult, *, took_s: float, is_refused: bool) -> None:
        """Take a group that has settled."""
        self._num_groups += 1
        if group.prompt.uid in self.cached:  # counted with the group, whose window may be a later one
            self.cached.discard(group.prompt.uid)
            self._num_replayed += 1
        self._took_s.append(took_s)
        self._trajectories.extend(group.trajectories)
        self._counts["failed_sessions"] += len(group.failures)
        self._counts["audited_sessions"] += group.num_audited
        self._counts["audit_failures"] += group.num_audit_failures
        self._counts["refused_groups"] += int(is_refused)

    @contextmanager
    def waiting(self, what: str, *, on: str) -> Iterator[None]:
        """Note a wait, while it lasts."""
        self._num_waits += 1
        number = self._num_waits
        self._waits[number] = (what, on, time.monotonic())
        try:
            yield
        finally:
            del self._waits[number]

    def waits(self, now: float) -> list[tuple[str, str, float]]:
        """Present waits: what, on whom, and for how many seconds."""
        return [(what, on, round(now - since, 1)) for what, on, since in self._waits.values()]

    def take(self, loads: Sequence[EngineLoad]) -> dict[str, Any]:
        """End the window, and begin the next.

        Args:
            loads: Of the engines, since they were started.

        Returns:
            `metrics` by name, `histograms` as `Histogram.to_json` gives them, `events` as dicts.
        """
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        metrics: dict[str, float] = {f"rollout/{name}": float(count) for name, count in self._counts.items()}
        metrics["rollout/made_up_groups"] = float(self.made_up)
        metrics["fully_async/count/total_generated_samples"] = float(len(self._trajectories))
        if self._num_replayed:
            metrics["rollout/replayed"] = self._num_replayed / self._num_groups
        if self._trajectories:
            timings = [trajectory.timings for trajectory in self._trajectories]
            metrics |= summarize_timings(self._trajectories)
            metrics |= summarize_components([trajectory.reward_components for trajectory in self._trajectories])
            metrics["timing_s/reward"] = sum(timing.reward_s for timing in timings) / len(timings)
            metrics["timing_s/reward_wait"] = sum(timing.reward_wait_s for timing in timings) / len(timings)
            metrics |= summarize_processing_times(self._took_s)
            self.say("slowest_session", **slowest_session(self._trajectories))
        metrics |= self._of_engines(loads, elapsed_s)
        histograms = self._histograms()
        events, self._events = self._events, []
        self._begin()
        return {"metrics": metrics, "histograms": histograms, "events": events}

    def _histograms(self) -> dict[str, Any]:
        """What the trajectories cost, as distributions."""
        recorder = Recorder()
        for name, values in timing_distributions([one.timings for one in self._trajectories]).items():
            recorder.record_values(name, values)
        return {name: one.to_json() for name, one in recorder.histograms().items()}

    def _of_engines(self, loads: Sequence[EngineLoad], elapsed_s: float) -> dict[str, float]:
        """Idle share and speed of the engines in this window."""
        busy_s = idle_s = 0.0
        tokens = 0
        for load in loads:
            busy_before, idle_before, tokens_before = self._last_loads.get(load.index, (0.0, 0.0, 0))
            busy_s += load.busy_s - busy_before
            idle_s += load.idle_s - idle_before
            tokens += load.num_tokens - tokens_before
        self._last_loads = {load.index: (load.busy_s, load.idle_s, load.num_tokens) for load in loads}
        metrics = {
            "fully_async/engines/total": float(len(loads)),
            "fully_async/engines/serving": float(sum(load.state == "serving" for load in loads)),
            "fully_async/restarts/engines": float(sum(load.num_restarts for load in loads)),
            "perf/rollouter_tokens_per_s": tokens / elapsed_s,
        }
        if busy_s + idle_s > 0:
            metrics["fully_async/rollouter/idle_ratio"] = idle_s / (busy_s + idle_s)
        return metrics
