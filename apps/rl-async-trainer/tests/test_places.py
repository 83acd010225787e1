"""Places of prompts in training, also after a resume."""

from rl_async_trainer.schedule.places import Places
from rl_async_trainer.schedule.record import History
from rl_async_trainer.schedule.restoring import restore_places
from rl_core import InProcessQueue, TaskSpec
from rl_core.testing import make_prompts
from rl_rollout.rollouter import refusal
from rl_rollout.schedule import ScheduleOptions
from rl_trainer_parts.rollouts.setup import TRAIN


def test_a_replacement_takes_the_place_of_the_group_that_it_replaces():
    places = Places({})
    assert places.take(["a", "b", "c"]) == {"a": 0, "b": 1, "c": 2}
    places.vacate("b")
    assert places.take(["c", "d", "e"]) == {"c": 2, "d": 1, "e": 3}


def test_a_resumed_run_fills_what_was_vacated_and_keeps_the_rest():
    """Of five prompts, p0 was refused and p4 took its place, p1 failed, and the line of p3 was lost with the kill."""
    queue = InProcessQueue([TaskSpec(name=TRAIN, needs=frozenset({"input_ids"}))])
    queue.issue(make_prompts(5), num_sessions=1)
    queue.fail("p0", 0, reason=refusal("reward_spread", "all rewards are 1"))
    queue.fail("p1", 0, reason="the engine fell")
    history = History(places={"p0": 0, "p1": 1, "p2": 2, "p4": 0})
    on_policy = ScheduleOptions(groups_per_step=2, num_steps=2, max_staleness=0)
    spent = restore_places(on_policy, queue.ledger(), history)
    assert spent.take(["p2", "p3", "p4", "new"]) == {"p2": 2, "p3": 3, "p4": 0, "new": 4}
    stale = ScheduleOptions(groups_per_step=2, num_steps=2, max_staleness=1)
    replaced = restore_places(stale, queue.ledger(), history)
    assert replaced.take(["p2", "p3", "p4", "new"]) == {"p2": 2, "p3": 1, "p4": 0, "new": 3}
