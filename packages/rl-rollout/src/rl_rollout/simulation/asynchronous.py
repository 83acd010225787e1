"""Asynchronous trainer in simulated time: the real `Scheduler`, with simulated engines and a simulated learner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from rl_core.errors import RLError
from rl_core.record_fields import settings_record
from rl_rollout.schedule import ScheduleOptions, Scheduler
from rl_rollout.simulation.engine import FOREVER, EnginePool, Response
from rl_rollout.simulation.lengths import GroupLengths
from rl_rollout.simulation.outcome import (
    Cluster,
    Outcome,
    bound_seconds,
    fill_seconds,
    generation_seconds,
    total_response_tokens,
)
from rl_rollout.simulation.workload import Workload


@settings_record
class Policy:
    """Schedule of the asynchronous trainer.

    Attributes:
        max_staleness: Maximum staleness, in versions.
        sync_every: Learner steps per policy version.
        partial_rollout: True continues responses under new weights; False delays a weight update until running
            responses end.
    """

    max_staleness: int = 1
    sync_every: int = 1
    partial_rollout: bool = True

    @property
    def mode(self) -> str:
        """Name of the mode that these settings give."""
        if self.max_staleness == 0:
            return "on policy" if self.sync_every == 1 else "stream"
        return "partial" if self.partial_rollout else "whole"


@dataclass(slots=True)
class _Totals:
    """Accumulated seconds."""

    wait: float = 0.0
    update: float = 0.0
    logprobs: float = 0.0
    training: float = 0.0
    engines_busy: float = 0.0
    end: float = 0.0


class AsyncSimulation:
    """One simulated run.

    Measurement begins after the first `max_staleness + 1` versions, when the pipeline is full. The schedule has as many
    extra versions after the measured ones, so that the engines never run out of prompts.

    Attributes:
        trained_groups: Numbers of the trained groups, in order.
    """

    def __init__(self, workload: Workload, cluster: Cluster, policy: Policy, *, num_versions: int, seed: int) -> None:
        """Set up the simulation. Nothing starts yet.

        Raises:
            SettingsError: The cluster or `sync_every` does not fit the workload.
        """
        self._workload = workload
        self._cluster = cluster
        self._policy = policy
        self._warm_up = policy.max_staleness + 1
        self._last = self._warm_up + num_versions
        self._num_engines = cluster.num_engines(workload)
        engine = workload.engine
        self._pool = EnginePool(
            self._num_engines, engine.step_seconds(), prefill_s_per_token=engine.prefill_s_per_token
        )
        self._lengths = GroupLengths(workload.lengths, group_size=workload.batch.group_size, seed=seed)
        per_engine = engine.inflight_groups
        self._scheduler = Scheduler(
            ScheduleOptions(
                groups_per_step=workload.batch.groups_per_step(policy.sync_every),
                num_steps=(self._last + self._warm_up) * policy.sync_every,
                max_staleness=policy.max_staleness,
                sync_every=policy.sync_every,
                max_inflight_groups=None if per_engine is None else per_engine * self._num_engines,
            )
        )
        self._now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._num_timers = 0
        self._num_issued = 0
        self._missing: dict[int, int] = {}
        self._oldest: dict[int, int] = {}
        self._num_partial: dict[int, int] = {}
        self._is_learner_free = True
        self._is_updating = self._is_draining = self._is_swapping = self._is_held = False
        self._free_since = 0.0
        self._totals = _Totals()
        self._full: _Totals | None = None
        self._last_step_s = 0.0
        self.trained_groups: list[int] = []
        self._staleness: list[int] = []
        self._trained_partial = 0

    def run(self) -> Outcome:
        """Run until the last measured version.

        Raises:
            RLError: The schedule is blocked, which is a bug in it.
        """
        while self._scheduler.num_steps < self._last * self._policy.sync_every:
            if self._is_draining and not self._scheduler.num_inflight:
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
        if self._is_draining or self._is_swapping:
            return
        _, count = self._scheduler.to_start()
        if not count:
            return
        groups = range(self._num_issued, self._num_issued + count)
        self._num_issued += count
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
        if not self._is_learner_free:
            return
        step = self._scheduler.next_step()
        if step is None:
            return
        groups = [int(uid) for uid in step]
        tokens = sum(map(self._lengths.num_tokens, groups))
        learner, gpus = self._workload.learner, self._cluster.train_gpus
        updates = len(groups) // self._workload.batch.mini_batch_groups
        update_s = learner.updates_seconds(tokens, num_updates=updates, gpus=gpus)
        logprobs_s = learner.logprobs_seconds(tokens, gpus=gpus) if learner.recomputes_logprobs else 0.0
        self._totals.wait += self._now - self._free_since
        self._totals.update += update_s
        self._totals.logprobs += logprobs_s
        self._last_step_s = learner.step_s + update_s + logprobs_s
        self._totals.training += self._last_step_s
        self._is_learner_free = False
        self._after(self._last_step_s, lambda: self._end_step(step, groups))

    def _end_step(self, step: tuple[str, ...], groups: list[int]) -> None:
        scheduler = self._scheduler
        version = scheduler.learner_version
        scheduler.trained(step)
        if self._full is not None:
            self._staleness += [version - self._oldest[group] for group in groups]
            self._trained_partial += sum(self._num_partial[group] for group in groups)
        self.trained_groups += groups
        for group in groups:
            del self._oldest[group], self._num_partial[group]
        if scheduler.num_steps % self._policy.sync_every:
            self._free_learner()
            return
        if scheduler.learner_version in (self._warm_up, self._last):
            self._totals.engines_busy = self._pool.busy_seconds(now=self._now)
            self._totals.end = self._now
            if scheduler.learner_version == self._warm_up:
                self._full, self._totals = self._totals, _Totals()
        if scheduler.learner_version == self._last:
            return
        if self._is_updating:
            self._is_held = True
        else:
            self._publish()

    def _free_learner(self) -> None:
        self._is_learner_free = True
        self._free_since = self._now

    # -- weights

    def _publish(self) -> None:
        """Send the learner's weights, then let it continue. It waits if an update is still running."""
        self._is_updating = True
        seconds = self._workload.weights.publish_s
        self._totals.training += seconds
        self._after(seconds, self._end_publishing)

    def _end_publishing(self) -> None:
        self._free_learner()
        self._is_draining = not self._policy.partial_rollout
        if not self._is_draining:
            self._swap()

    def _swap(self) -> None:
        self._is_draining, self._is_swapping = False, True
        weights = self._workload.weights
        self._pool.stall(weights.swap_s, now=self._now, recomputes_prefixes=weights.recomputes_prefixes)
        self._after(weights.swap_s, self._end_swap)

    def _end_swap(self) -> None:
        self._is_swapping = self._is_updating = False
        self._scheduler.published(self._scheduler.served_version + 1)
        if self._is_held:
            self._is_held = False
            self._publish()

    # -- time

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._num_timers += 1
        heappush(self._timers, (self._now + seconds, self._num_timers, act))

    # -- outcome

    def _outcome(self) -> Outcome:
        full, measured = self._full, self._totals
        if full is None:
            raise RLError("the simulated run ended before its pipeline was full.")
        versions = self._last - self._warm_up
        seconds = measured.end - full.end
        fill_s = fill_seconds(
            self._workload,
            self._lengths,
            groups=self._scheduler.options.groups_per_step,
            num_groups=self._warm_up * self._workload.batch.groups,
        )
        generation_s = generation_seconds(
            self._workload, total_response_tokens(self._lengths, self.trained_groups), num_engines=self._num_engines
        )
        num_measured = len(self._staleness)
        return Outcome(
            mode=self._policy.mode,
            cluster=self._cluster,
            max_staleness=self._policy.max_staleness,
            sync_every=self._policy.sync_every,
            step_s=seconds / versions,
            gen_s=measured.wait / versions,
            logprobs_s=measured.logprobs / versions,
            update_s=measured.update / versions,
            idle_learner=measured.wait / seconds,
            idle_engines=1 - (measured.engines_busy - full.engines_busy) / (seconds * self._num_engines),
            mean_staleness=sum(self._staleness) / num_measured,
            max_seen_staleness=max(self._staleness),
            partial_share=self._trained_partial / (num_measured * self._workload.batch.group_size),
            wall_s=measured.end,
            bound_s=bound_seconds(
                fill_s,
                generation_s=generation_s,
                training_s=full.training + measured.training,
                last_step_s=self._last_step_s,
            ),
            num_versions=self._last,
        )


def simulate_async(workload: Workload, cluster: Cluster, policy: Policy, *, num_versions: int, seed: int) -> Outcome:
    """Simulate the asynchronous trainer for a number of versions. See `AsyncSimulation`."""
    return AsyncSimulation(workload, cluster, policy, num_versions=num_versions, seed=seed).run()
