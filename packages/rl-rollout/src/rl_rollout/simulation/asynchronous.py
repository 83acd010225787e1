"""Asynchronous trainer in simulated time: the real `Scheduler`, with simulated engines and a simulated learner."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from rl_core.errors import RLError
from rl_core.record_fields import NonNegativeInt, PositiveInt, settings_record
from rl_rollout.schedule import ScheduleOptions, Scheduler
from rl_rollout.simulation.engine import FOREVER, EnginePool, Response
from rl_rollout.simulation.outcome import GpuSplit, SimulatedRun
from rl_rollout.simulation.workload import GroupLengths, Workload


@settings_record
class Schedule:
    """Schedule of the asynchronous trainer.

    Attributes:
        max_staleness: Maximum staleness, in versions.
        sync_every: Learner steps per policy version.
        partial_rollout: True continues responses under new weights; False delays a weight update until running
            responses end.
    """

    max_staleness: NonNegativeInt = 1
    sync_every: PositiveInt = 1
    partial_rollout: bool = True

    @property
    def mode(self) -> str:
        """Name of the mode that these settings give."""
        if self.max_staleness == 0:
            return "on policy" if self.sync_every == 1 else "stream"
        return "partial" if self.partial_rollout else "whole"


class AsyncSimulation:
    """One simulated run.

    Measurement begins after the first `max_staleness + 1` versions, when the pipeline is full. The schedule has as many
    extra versions after the measured ones, so that the engines never run out of prompts.

    Attributes:
        trained_groups: Numbers of the trained groups, in order.
    """

    def __init__(
        self, workload: Workload, split: GpuSplit, schedule: Schedule, *, num_versions: int, seed: int
    ) -> None:
        """Set up the simulation. Nothing starts yet.

        Raises:
            SettingsError: The split or `sync_every` does not fit the workload.
        """
        self._workload = workload
        self._split = split
        self._schedule = schedule
        self._warm_up = schedule.max_staleness + 1
        self._last = self._warm_up + num_versions
        self._num_engines = split.num_engines(workload)
        engine = workload.engine
        self._pool = EnginePool(
            self._num_engines, engine.step_seconds(), prefill_s_per_token=engine.prefill_s_per_token
        )
        self._lengths = GroupLengths(workload.lengths, group_size=workload.batch.group_size, seed=seed)
        per_engine = engine.inflight_groups
        self._scheduler = Scheduler(
            ScheduleOptions(
                groups_per_step=workload.batch.groups_per_step(schedule.sync_every),
                num_steps=(self._last + self._warm_up) * schedule.sync_every,
                max_staleness=schedule.max_staleness,
                sync_every=schedule.sync_every,
                max_inflight_groups=None if per_engine is None else per_engine * self._num_engines,
            )
        )
        self._now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = count()
        self._num_issued = 0
        self._missing: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        self._num_partial: dict[int, int] = {}
        self._update: Literal["none", "publishing", "draining", "swapping"] = "none"
        self._is_held = False  # True while the learner waits for the end of an update to begin the next
        self._free_since: float | None = 0.0  # None while the learner works
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._warm_up_seconds: defaultdict[str, float] = defaultdict(float)
        self._last_step_s = 0.0
        self.trained_groups: list[int] = []
        self._staleness: list[int] = []
        self._trained_partial = 0

    def run(self) -> SimulatedRun:
        """Run until the last measured version.

        Raises:
            RLError: The schedule is blocked, which is a bug in it.
        """
        while self._scheduler.num_steps < self._last * self._schedule.sync_every:
            if self._update == "draining" and (self._schedule.partial_rollout or not self._scheduler.num_inflight):
                self._swap()
            self._start_groups()
            self._start_step()
            end, timer = self._pool.next_end(), self._timers[0][0] if self._timers else FOREVER
            if end == timer == FOREVER:
                raise RLError(f"the simulated schedule is blocked: {self._scheduler.blockage()}.")
            if timer <= end:
                self._now, _, act = heappop(self._timers)
                act()
            else:
                self._finish_groups(until=timer)
        return self._outcome()

    # -- engines

    def _start_groups(self) -> None:
        if self._update in ("draining", "swapping"):
            return
        num_new = self._scheduler.to_start()[1]
        if not num_new:
            return
        groups = range(self._num_issued, self._num_issued + num_new)
        self._num_issued += num_new
        uids = [str(group) for group in groups]
        self._scheduler.issued(uids)
        self._scheduler.started(uids)
        prompt = self._workload.lengths.prompt_tokens
        responses = [Response(group, tokens, prompt) for group in groups for tokens in self._lengths[group]]
        for group in groups:
            self._missing[group] = self._workload.batch.group_size
            self._num_partial[group] = 0
        self._note_begun(self._pool.add(responses, now=self._now))

    def _finish_groups(self, *, until: float) -> None:
        """Let responses end until a group is complete, because nothing is decided before that."""
        pool, missing, version = self._pool, self._missing, self._scheduler.served_version
        is_whole = False
        while not is_whole and (end := pool.next_end()) < until:
            self._now = end
            ended, begun = pool.finish()
            self._note_begun(begun)
            for response in ended:
                group = response.group
                self._num_partial[group] += response.version != version
                missing[group] -= 1
                if not missing[group]:
                    del missing[group]
                    self._scheduler.settled(str(group), oldest_version=self._oldest[group])
                    is_whole = True

    def _note_begun(self, responses: Sequence[Response]) -> None:
        version = self._scheduler.served_version
        for response in responses:
            response.version = version
            self._oldest.setdefault(response.group, version)

    # -- learner

    def _start_step(self) -> None:
        if self._free_since is None or (step := self._scheduler.next_step()) is None:
            return
        groups = [int(uid) for uid in step]
        tokens = sum(map(self._lengths.num_tokens, groups))
        learner, gpus = self._workload.learner, self._split.train_gpus
        updates = len(groups) // self._workload.batch.mini_batch_groups
        update_s = learner.updates_seconds(tokens, num_updates=updates, gpus=gpus)
        logprobs_s = learner.logprobs_seconds(tokens, gpus=gpus) if learner.recomputes_logprobs else 0.0
        self._last_step_s = learner.step_s + update_s + logprobs_s
        self._add(
            waiting=self._now - self._free_since, update=update_s, logprobs=logprobs_s, training=self._last_step_s
        )
        self._free_since = None
        self._after(self._last_step_s, lambda: self._end_step(step, groups))

    def _end_step(self, step: tuple[str, ...], groups: list[int]) -> None:
        scheduler = self._scheduler
        version = scheduler.learner_version
        scheduler.trained(step)
        if self._warm_up_seconds:
            self._staleness += [version - self._oldest[group] for group in groups]
            self._trained_partial += sum(self._num_partial[group] for group in groups)
        self.trained_groups += groups
        for group in groups:
            del self._oldest[group], self._num_partial[group]
        if scheduler.num_steps % self._schedule.sync_every:
            self._free_since = self._now
            return
        if scheduler.learner_version in (self._warm_up, self._last):
            self._seconds["busy"] = self._pool.busy_seconds(now=self._now)
            self._seconds["end"] = self._now
            if scheduler.learner_version == self._warm_up:
                self._warm_up_seconds = self._seconds.copy()
        if scheduler.learner_version == self._last:
            return
        self._is_held = self._update != "none"
        if not self._is_held:
            self._publish()

    # -- weights

    def _publish(self) -> None:
        """Send the learner's weights, then let it continue. It waits if an update is still running."""
        self._update = "publishing"
        seconds = self._workload.weights.publish_s
        self._add(training=seconds)
        self._after(seconds, self._end_publishing)

    def _end_publishing(self) -> None:
        self._free_since, self._update = self._now, "draining"

    def _swap(self) -> None:
        self._update = "swapping"
        weights = self._workload.weights
        self._pool.stall(weights.swap_s, now=self._now, recomputes_prefixes=weights.recomputes_prefixes)
        self._after(weights.swap_s, self._end_swap)

    def _end_swap(self) -> None:
        self._update = "none"
        self._scheduler.published(self._scheduler.served_version + 1)
        if self._is_held:
            self._is_held = False
            self._publish()

    # -- time

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._timers, (self._now + seconds, next(self._timer_numbers), act))

    def _add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._seconds[name] += value

    # -- outcome

    def _outcome(self) -> SimulatedRun:
        workload, lengths, schedule, seconds = self._workload, self._lengths, self._schedule, self._seconds
        measured = {name: value - self._warm_up_seconds[name] for name, value in seconds.items()}
        versions, num_measured = self._last - self._warm_up, len(self._staleness)
        longest = sorted(max(lengths[group]) for group in range(self._warm_up * workload.batch.groups))
        fill_s = longest[self._scheduler.options.groups_per_step - 1] * workload.engine.step_seconds()[1]
        num_tokens = sum(sum(lengths[group]) for group in self.trained_groups)
        generation_s = workload.engine.generation_seconds(num_tokens, num_engines=self._num_engines)
        return SimulatedRun(
            mode=schedule.mode,
            split=self._split,
            max_staleness=schedule.max_staleness,
            sync_every=schedule.sync_every,
            step_s=measured["end"] / versions,
            gen_s=measured["waiting"] / versions,
            logprobs_s=measured["logprobs"] / versions,
            update_s=measured["update"] / versions,
            idle_learner=measured["waiting"] / measured["end"],
            idle_engine=1 - measured["busy"] / (measured["end"] * self._num_engines),
            staleness_mean=sum(self._staleness) / num_measured,
            staleness_max=max(self._staleness),
            partial_ratio=self._trained_partial / (num_measured * workload.batch.group_size),
            wall_s=seconds["end"],
            # The learner cannot train before the shortest groups of a first step, each decoded alone, are there, and
            # the engines must generate everything before the last step.
            bound_s=max(fill_s + seconds["training"], generation_s + self._last_step_s),
            versions=self._last,
        )


def simulate_async(
    workload: Workload, split: GpuSplit, schedule: Schedule, *, num_versions: int, seed: int
) -> SimulatedRun:
    """Simulate the asynchronous trainer for a number of versions. See `AsyncSimulation`."""
    return AsyncSimulation(workload, split, schedule, num_versions=num_versions, seed=seed).run()
