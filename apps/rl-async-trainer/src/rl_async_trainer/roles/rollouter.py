"""The run's rollouter: its engines, agent loop, rewards, skip cache and metrics."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_async_trainer.messages import ValidationBatch
from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_core.errors import NotReadyError
from rl_core.gpus import gpu_use_of
from rl_metrics.reductions import (
    Recorder,
    summarize_components,
    summarize_gpus,
    summarize_processing_times,
    summarize_timings,
    timing_distributions,
)
from rl_rollout.engines import EngineLoad, ReplicatedEngine, RolloutEngine
from rl_rollout.rollouter import Refusals, Rollouter, RollouterOptions, RolloutWindow
from rl_trainer_parts.learning.objective import needs_greedy
from rl_trainer_parts.reporting.failed_sessions import FailedSessions
from rl_trainer_parts.reporting.step_metrics import (
    make_memory_watch,
    reward_times,
    slowest_session,
    summarize_sessions,
)
from rl_trainer_parts.rollouts.answers import Answer, answers_of
from rl_trainer_parts.rollouts.engines import make_engine, make_replica, replica_pool, start_within
from rl_trainer_parts.rollouts.evaluation import answer_problems
from rl_trainer_parts.rollouts.inputs import read_tokenizer
from rl_trainer_parts.rollouts.setup import open_rollout, put_trajectories, sampling_params
from rl_trainer_parts.rollouts.skip_cache import groupwise_cache
from rl_trainer_parts.rollouts.teacher_prompts import TeacherPrompts

FAILED_STEPS = 2
"""Consecutive failed groups that stop a run, in steps; on policy, one step whose groups all fail stops it too."""


class RunRollouter(Rollouter):
    """The run's rollouter; one per run."""

    def __init__(
        self,
        settings: AsyncSettings,
        queue: TransferQueue,
        *,
        log_directory: Path | None = None,
        prompts_digest: str = "",
    ) -> None:
        """Set the parameters; models load in `start`.

        Args:
            settings: The run's settings.
            queue: Receives the generated groups.
            log_directory: Where engines in other processes write their output.
            prompts_digest: Digest of the training prompts, for the skip cache.
        """
        options = RollouterOptions(
            group_size=settings.rollout.group_size,
            sampling=sampling_params(settings),
            seed=settings.run.seed,
            with_baseline=needs_greedy(settings),
            deadline_s=settings.rollout.deadline_s,
            max_failures=FAILED_STEPS * settings.rollout.prompts_per_step,
        )
        super().__init__(queue, options)
        self._settings = settings
        self._log_directory = log_directory
        self._prompts_digest = prompts_digest
        is_apart = settings.roles.placement != "inline"  # an inline role shares the controller's memory
        self._memory = make_memory_watch(settings, "rollouter", say=self.say) if is_apart else None

    async def start(self) -> str:
        """Start engines, rewards and tools; return the engine's name.

        Raises:
            EngineError: An engine cannot start.
            DeadlineError: The start took too long.
        """
        settings = self._settings
        tokenizer = read_tokenizer(settings)
        prompts = TeacherPrompts.of(settings, tokenizer)
        self.put = lambda pairs: put_trajectories(self.queue, settings, prompts.added(pairs))
        self.refusals = make_refusals(settings)
        self.engine = self.make_engine()
        await start_within(self.engine, settings)
        opening = open_rollout(settings, tokenizer, self.engine, served=lambda: self.served_version)
        self.rollout = self.opened.enter_context(opening)
        await self.rollout.start()
        if settings.rollout_cache.enabled:
            self.stored = groupwise_cache(
                settings,
                tokenizer,
                self.rollout,
                engine=self.engine.traits.name,
                prompts_digest=self._prompts_digest,
                replaces_failed=not settings.schedule_options.is_on_policy,
                say=self.say,
            )
        return self.engine.traits.name

    def make_engine(self) -> ReplicatedEngine:
        """The engines, not started."""
        return make_engine(self._settings, self._settings.policy.path, log_directory=self._log_directory)

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """Answer validation problems."""
        groups = await answer_problems(self._settings, self._started[1], batch.prompts)
        return answers_of(groups, source="rollouter")

    async def window(self, step: int) -> dict[str, Any]:
        """Activity since the last call.

        Args:
            step: The step just trained.

        Returns:
            `metrics` by name, `histograms` from `Histogram.to_json`, `events` as dicts, and as `rollouts` the drafts of
            failed sessions.
        """
        window, loads = self.take_window()
        metrics = window_metrics(window, loads, elapsed_s=max(time.monotonic() - window.began, 1e-9))
        metrics |= summarize_gpus("engine", await gpu_use_of(self.engine))
        failed = FailedSessions.among(answers_of(window.groups, source="rollouter"))
        failed.tell(window.say, step=step, during="training")
        metrics["rollout/failed_rewards"] = float(failed.num_rewards)
        if window.timed:
            window.say("slowest_session", **slowest_session(window.timed))
        recorder = Recorder()
        recorder.record_distributions(timing_distributions([session.timings for session in window.timed]))
        histograms = {name: histogram.to_json() for name, histogram in recorder.histograms().items()}
        if self._memory is not None:
            metrics |= self._memory.step()
        rollouts = failed.drafts(self._settings, step=step)
        return {"metrics": metrics, "histograms": histograms, "events": window.events, "rollouts": rollouts}

    async def last_events(self) -> list[dict[str, Any]]:
        """Events since the last window at the end of a run, with those of entries that it does not store."""
        if self.stored is not None:
            self.stored.give_up_rest()
        return self.take_window()[0].events

    async def set_num_engines(self, count: int) -> int:
        """Add or remove engines while the run continues; return their number.

        Raises:
            NotReadyError: The engine is inline, or none would be left.
        """
        if self._settings.rollout.placement == "inline":
            raise NotReadyError(
                "engines can be added and removed only in separate processes: set rollout.placement to "
                '"process" or "ray"; found "inline".'
            )
        return await self.scale(count, self._make_replica)

    def _make_replica(self, index: int) -> RolloutEngine:
        pool = replica_pool(self._settings)
        own = None if pool is None else replace(pool, name=f"{pool.name} {index}", size=1)
        policy, logs = self._settings.policy.path, self._log_directory
        return make_replica(self._settings, policy, index=index, pool=own, log_directory=logs)


def make_refusals(settings: AsyncSettings) -> Refusals | None:
    """The group filter, if any; within a version it refuses the same groups as a synchronous run.

    The synchronous trainer keeps the groups of its last round, whatever the filter says. Here groups arrive one by one:
    once a policy version has refused as many as all rounds but the last would have, further groups train.
    """
    refill = settings.dynamic_sampling
    if not refill.filter:
        return None
    return Refusals(refill.filter, most=(refill.max_rounds - 1) * settings.schedule_options.groups_per_version)


def window_metrics(window: RolloutWindow, loads: Sequence[EngineLoad], *, elapsed_s: float) -> dict[str, float]:
    """Metrics of a rollouter's activity.

    Args:
        window: The activity.
        loads: Load of the engines at the end of the window, since their start.
        elapsed_s: Duration of the window.
    """
    metrics = {
        "rollout/failed_sessions": float(window.failed_sessions),
        **summarize_sessions(window.groups),
        "rollout/refused_groups": float(window.refused_groups),
        "rollout/made_up_groups": float(window.made_up_groups),
        "fully_async/count/total_generated_samples": float(len(window.trajectories)),
        "fully_async/engines/total": float(len(loads)),
        "fully_async/engines/serving": float(sum(load.state == "serving" for load in loads)),
        "fully_async/restarts/engines": float(sum(load.num_restarts for load in loads)),
    }
    if window.trajectories:
        metrics |= summarize_components([trajectory.reward_components for trajectory in window.trajectories])
        metrics |= summarize_processing_times(window.took_s)
    metrics |= summarize_timings(window.timed) | reward_times([one.timings for one in window.timed])
    before = {load.index: load for load in window.loads}

    def added(name: str) -> float:
        return float(sum(getattr(load, name) - getattr(before.get(load.index), name, 0.0) for load in loads))

    metrics["perf/rollouter_tokens_per_s"] = added("num_tokens") / elapsed_s
    idle_s = added("idle_s")
    if (busy_s := added("busy_s")) + idle_s > 0:
        metrics["fully_async/rollouter/idle_ratio"] = idle_s / (busy_s + idle_s)
    return metrics
