"""Simulated trainers, compared with times computed by hand, and properties of every schedule."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rl_core.errors import SettingsError
from rl_rollout.schedule import Scheduler
from rl_rollout.simulation.asynchronous import AsyncSimulation, Schedule, simulate_async
from rl_rollout.simulation.engine import EnginePool
from rl_rollout.simulation.outcome import GpuSplit
from rl_rollout.simulation.synchronous import simulate_sync
from rl_rollout.simulation.workload import BatchShape, EngineCosts, LearnerCosts, Lengths, WeightCosts, Workload

EQUAL = Workload(
    name="equal",
    batch=BatchShape(groups=4, group_size=2, mini_batch_groups=1),
    lengths=Lengths(median=100, sigma=0.0, maximum=100),
    engine=EngineCosts(gpus=1, slots=8, decode=((0, 0.1), (8, 0.1))),
    learner=LearnerCosts(update_gpu_s_per_token=0.01, sync_step_s=0.5),
    weights=WeightCosts(publish_s=1.0, swap_s=0.5),
)
"""8 responses of 100 tokens in 10 s on one engine; 800 tokens in 8 s on one GPU that trains."""
ONE_TO_ONE = GpuSplit(rollout_gpus=1, train_gpus=1)
TAILED = replace(
    EQUAL,
    batch=BatchShape(groups=16, group_size=4, mini_batch_groups=2),
    lengths=Lengths(median=60, sigma=1.2, maximum=3000, group_correlation=0.3, prompt_tokens=5),
    engine=EngineCosts(gpus=1, slots=16, decode=((1, 0.01), (16, 0.02)), prefill_s_per_token=1e-4),
    learner=LearnerCosts(update_gpu_s_per_token=0.0008, update_s=0.01, step_s=0.01),
    weights=WeightCosts(publish_s=0.05, swap_s=0.05),
)
SCHEDULES = [
    Schedule(max_staleness=staleness, sync_every=sync_every, partial_rollout=partial)
    for staleness in (0, 1, 3)
    for sync_every in (1, 4)
    for partial in (True, False)
]


def test_a_synchronous_step_generates_then_trains_then_updates_the_weights() -> None:
    outcome = simulate_sync(EQUAL, gpus=2, num_steps=3, seed=0)  # two engines with 4 responses each
    assert outcome.step_s == pytest.approx(10 + 4 + 0.5 + 1.5)
    assert (outcome.gen_s, outcome.update_s) == (pytest.approx(10), pytest.approx(4))
    assert outcome.idle_engine == pytest.approx(6 / 16)
    assert outcome.idle_learner == pytest.approx(11.5 / 16)


def test_shared_gpus_slow_updates_down_as_the_workload_says() -> None:
    slow = replace(EQUAL, learner=replace(EQUAL.learner, colocated_slowdown=1.5))
    assert simulate_sync(slow, gpus=2, num_steps=2, seed=0).update_s == pytest.approx(6)
    apart = [simulate_async(one, ONE_TO_ONE, Schedule(), num_versions=2, seed=0).update_s for one in (EQUAL, slow)]
    assert apart == [pytest.approx(8)] * 2


def test_on_policy_takes_turns() -> None:
    outcome = simulate_async(EQUAL, ONE_TO_ONE, Schedule(max_staleness=0), num_versions=3, seed=0)
    assert outcome.mode == "on policy"
    assert outcome.step_s == pytest.approx(10 + 8 + 1.5)
    assert outcome.gen_s == pytest.approx(10.5)  # the learner is free once it has sent the weights
    assert outcome.staleness_mean == 0


def test_a_version_that_is_streamed_trains_what_is_there() -> None:
    slots = replace(EQUAL, engine=replace(EQUAL.engine, slots=2))  # one group after another, 10 s each
    outcome = simulate_async(slots, ONE_TO_ONE, Schedule(max_staleness=0, sync_every=4), num_versions=3, seed=0)
    assert outcome.mode == "stream"
    assert outcome.step_s == pytest.approx(4 * 10 + 2 + 1.5)  # generation hides all training but the last group's


def test_one_version_of_staleness_hides_the_shorter_of_both() -> None:
    outcome = simulate_async(EQUAL, ONE_TO_ONE, Schedule(max_staleness=1), num_versions=6, seed=0)
    assert outcome.step_s == pytest.approx(10 + 0.5)  # generation and its stall hide 8 s of training
    assert outcome.idle_engine == pytest.approx(0.5 / 10.5, abs=0.02)
    assert outcome.staleness_max == 1


def test_training_that_takes_longer_is_never_interrupted() -> None:
    slow = replace(EQUAL, learner=replace(EQUAL.learner, update_gpu_s_per_token=0.04))
    outcome = simulate_async(slow, ONE_TO_ONE, Schedule(max_staleness=1), num_versions=6, seed=0)
    assert outcome.step_s == pytest.approx(32 + 1)  # publishing takes the learner's time, the swap does not
    assert outcome.idle_learner == 0
    assert outcome.wall_s == pytest.approx(outcome.bound_s)


def test_whole_rollouts_wait_for_what_was_started_and_partial_ones_do_not() -> None:
    whole, partial = (
        simulate_async(
            TAILED,
            ONE_TO_ONE,
            Schedule(max_staleness=2, sync_every=2, partial_rollout=is_partial),
            num_versions=6,
            seed=0,
        )
        for is_partial in (False, True)
    )
    assert whole.partial_ratio == 0 < partial.partial_ratio
    assert partial.step_s < whole.step_s


@pytest.mark.parametrize(("inflight_groups", "lag"), [(None, 2), (4, 1)])
def test_a_drain_starts_nothing_and_the_learner_never_outruns_two_updates(
    inflight_groups: int | None, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an in-flight limit, a long drain delays the next update; with one, each ended group frees a place."""
    engine = replace(TAILED.engine, inflight_groups=inflight_groups)
    fast = replace(TAILED, engine=engine, learner=replace(TAILED.learner, update_gpu_s_per_token=1e-5))
    simulation = AsyncSimulation(
        fast, ONE_TO_ONE, Schedule(max_staleness=3, partial_rollout=False), num_versions=8, seed=0
    )
    events: list[str] = []
    lags: list[int] = []

    def spied(kind: type, name: str, note: Callable[[Any], None]) -> None:
        inner = getattr(kind, name)

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(self)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, outer)

    spied(AsyncSimulation, "_end_publishing", lambda _: events.append("sent"))
    spied(EnginePool, "stall", lambda _: events.append("swap"))
    spied(Scheduler, "started", lambda _: events.append("start"))
    spied(Scheduler, "published", lambda it: lags.append(it.learner_version - it.served_version))
    simulation.run()
    after = [then for now, then in pairwise(events) if now == "sent"]
    assert len(after) >= 8
    assert set(after) == {"swap"}
    assert max(lags) == lag


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_group_is_older_than_allowed_and_no_schedule_beats_the_bound(schedule: Schedule) -> None:
    for seed in range(3):
        outcome = simulate_async(TAILED, ONE_TO_ONE, schedule, num_versions=4, seed=seed)
        assert outcome.staleness_max <= schedule.max_staleness
        assert 0 < outcome.share_of_bound <= 1
        assert 0 <= outcome.idle_engine <= 1
        assert 0 <= outcome.idle_learner <= 1


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = (
        simulate_async(TAILED, ONE_TO_ONE, Schedule(), num_versions=3, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_every_group_is_trained_once_and_none_is_left_behind() -> None:
    simulation = AsyncSimulation(TAILED, ONE_TO_ONE, Schedule(sync_every=4), num_versions=4, seed=0)
    simulation.run()
    trained = simulation.trained_groups
    assert len(trained) == len(set(trained)) == 6 * TAILED.batch.groups
    assert max(trained) < 6 * TAILED.batch.groups + 2 * TAILED.batch.groups


def test_a_limit_of_groups_in_flight_is_kept_for_each_engine() -> None:
    limited = replace(TAILED, engine=replace(TAILED.engine, inflight_groups=1))
    fast = simulate_async(TAILED, ONE_TO_ONE, Schedule(max_staleness=2), num_versions=4, seed=0)
    slow = simulate_async(limited, ONE_TO_ONE, Schedule(max_staleness=2), num_versions=4, seed=0)
    assert slow.step_s > 1.5 * fast.step_s


def test_clusters_and_versions_that_do_not_fit_are_refused() -> None:
    big = replace(EQUAL, engine=replace(EQUAL.engine, gpus=4))
    with pytest.raises(SettingsError, match=r"multiple of engine\.gpus = 4"):
        simulate_async(big, GpuSplit(rollout_gpus=6, train_gpus=2), Schedule(), num_versions=1, seed=0)
    with pytest.raises(SettingsError, match=r"multiple of engine\.gpus = 4"):
        simulate_sync(big, gpus=2, num_steps=1, seed=0)
    with pytest.raises(SettingsError, match="sync_every must divide the 4 mini-batches"):
        simulate_async(EQUAL, ONE_TO_ONE, Schedule(sync_every=3), num_versions=1, seed=0)
    with pytest.raises(SettingsError, match="at least one GPU must train"):
        simulate_async(EQUAL, GpuSplit(rollout_gpus=2, train_gpus=0), Schedule(), num_versions=1, seed=0)
