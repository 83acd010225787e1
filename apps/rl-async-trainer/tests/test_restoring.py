"""A resumed run's schedule counts the groups in the ledger as before."""

from types import SimpleNamespace
from typing import Any

import pytest

from rl_async_trainer.record import AsyncState, ScheduleHistory
from rl_async_trainer.restoring import PromptPlaces, restore_places, restore_schedule
from rl_core import Batch, InProcessQueue, TaskSpec
from rl_core.errors import RolloutError
from rl_core.testing import make_prompts, make_trajectory
from rl_rollout.prompts.source import PromptSupply
from rl_rollout.rollouter.group_events import refusal
from rl_rollout.schedule import ScheduleOptions, Scheduler
from rl_trainer_parts.rollouts.setup import TRAIN

ON_POLICY = ScheduleOptions(groups_per_step=4, num_steps=3, max_staleness=0, sync_every=1)


def queue_of(num_prompts: int) -> InProcessQueue:
    """Return a queue with the first prompts issued, two sessions each."""
    queue = InProcessQueue([TaskSpec(name=TRAIN, needs=frozenset({"input_ids"}))])
    queue.issue(make_prompts(num_prompts), num_sessions=2)
    return queue


def restored(queue: InProcessQueue, plan: ScheduleHistory | None = None) -> Scheduler:
    """Return a new attempt's schedule without a checkpoint; with a plan, the schedule of a replay."""
    source: Any = SimpleNamespace(next=make_prompts)
    supply = PromptSupply(source)
    return restore_schedule(ON_POLICY, AsyncState(), queue, supply, ScheduleHistory(), plan=plan)


def test_groups_that_a_filter_refused_are_replaced_when_an_on_policy_run_goes_on():
    queue = queue_of(6)
    for uid in ("p0", "p1", "p2", "p3"):
        for index in range(2):
            queue.fail(uid, index, reason=refusal("reward_spread", "all rewards are 1"))
    scheduler = restored(queue)
    assert scheduler.num_spent == 0
    assert not scheduler.is_without_groups
    assert scheduler.to_start() == (["p4", "p5"], 2)


def test_groups_that_failed_are_not_replaced_when_an_on_policy_run_goes_on():
    queue = queue_of(6)
    queue.fail("p0", 0, reason="the reward raised: no answer")
    queue.fail("p0", 1, reason="the engine fell")
    for index in range(2):
        queue.fail("p1", index, reason=refusal("reward_spread", "all rewards are 1"))
    scheduler = restored(queue)
    assert scheduler.num_spent == 1
    assert scheduler.to_start() == (["p2", "p3", "p4"], 0)


@pytest.mark.parametrize("settled", [{}, {"p0": (None, 0), "p1": (None, 0)}])
def test_groups_from_a_skip_cache_count_as_of_their_start_also_if_a_kill_lost_their_lines(settled):
    """Their tokens are of version 0, and the run was killed in version 4."""
    queue = queue_of(2)
    queue.put_batch(Batch.from_trajectories([make_trajectory(uid, index) for uid in ("p0", "p1") for index in (0, 1)]))
    history = ScheduleHistory(begun={"p0": 4, "p1": 4}, started={"p0": 4, "p1": 4}, settled=settled)
    options = ScheduleOptions(groups_per_step=1, num_steps=6, max_staleness=1, sync_every=1)
    source: Any = SimpleNamespace(next=make_prompts)
    scheduler = restore_schedule(options, AsyncState(), queue, PromptSupply(source), history)
    assert scheduler.replayed == {"p0", "p1"}
    scheduler.num_steps = 5
    assert scheduler.stale() == ()
    scheduler.num_steps = 6
    assert scheduler.stale() == ("p0", "p1")


def test_a_replay_does_not_go_on_without_a_group_that_failed_before():
    queue = queue_of(4)
    for uid in ("p0", "p3"):
        for index in range(2):
            queue.fail(uid, index, reason="the engine fell")
    plan = ScheduleHistory(issued=dict.fromkeys(["p0", "p1", "p2", "p3"]), steps={1: ("p1",), 2: ("p2", "p3")})
    with pytest.raises(
        RolloutError, match=r"trained group p3 in step 2, but .* failed in the replay: no rows: the engine"
    ):
        restored(queue, plan)


def test_a_replacement_takes_the_place_of_the_group_that_it_replaces():
    places = PromptPlaces({})
    assert places.take(["a", "b", "c"]) == {"a": 0, "b": 1, "c": 2}
    places.vacate("b")
    assert places.take(["c", "d", "e"]) == {"c": 2, "d": 1, "e": 3}


def test_a_resumed_run_fills_what_was_vacated_and_keeps_the_rest():
    """Of five prompts, p0 was refused and p4 took its place, p1 failed, and the line of p3 was lost with the kill."""
    queue = InProcessQueue([TaskSpec(name=TRAIN, needs=frozenset({"input_ids"}))])
    queue.issue(make_prompts(5), num_sessions=1)
    queue.fail("p0", 0, reason=refusal("reward_spread", "all rewards are 1"))
    queue.fail("p1", 0, reason="the engine fell")
    history = ScheduleHistory(places={"p0": 0, "p1": 1, "p2": 2, "p4": 0})
    on_policy = ScheduleOptions(groups_per_step=2, num_steps=2, max_staleness=0)
    spent = restore_places(on_policy, queue.ledger(), history)
    assert spent.take(["p2", "p3", "p4", "new"]) == {"p2": 2, "p3": 3, "p4": 0, "new": 4}
    stale = ScheduleOptions(groups_per_step=2, num_steps=2, max_staleness=1)
    replaced = restore_places(stale, queue.ledger(), history)
    assert replaced.take(["p2", "p3", "p4", "new"]) == {"p2": 2, "p3": 1, "p4": 0, "new": 3}
