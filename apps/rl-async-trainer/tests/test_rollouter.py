"""The rollouter: its events for partly settled groups, and its publishing of weights."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from scripted_replicas import EXACT, a_canary, an_update

from rl_async_trainer.roles.rollouter import RunRollouter, make_refusals
from rl_async_trainer.settings import AsyncSettings
from rl_core import Batch, InProcessQueue, TaskSpec
from rl_core.data.records import NO_VERSION
from rl_core.testing import make_prompt, make_trajectory
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.rollouter.group_events import Dispatch, GroupEvent
from rl_trainer_parts.rollouts.setup import TRAIN
from rl_trainer_parts.settings.sources import build_settings

PROMPT = make_prompt("p0")
FAILED = SessionResult(failure="the engine fell")


def settings_in(folder: Path, **sections: dict[str, Any]) -> AsyncSettings:
    values = {
        "run": {"directory": folder},
        "policy": {"path": "policy"},
        "prompts": {"train": "train.jsonl"},
        "reward": {"function": "exact_match"},
        "rollout": {"group_size": 3, "deadline_s": 900.0},
        **sections,
    }
    return build_settings(values, kind=AsyncSettings)


def answered(index: int, version: int) -> SessionResult:
    """Return a session sampled by one policy version."""
    plain = make_trajectory("p0", index)
    versions = np.where(plain.loss_mask, version, NO_VERSION).astype(np.int32)
    return SessionResult(trajectories=(replace(plain, policy_versions=versions),))


def queue_with(*sessions: SessionResult) -> InProcessQueue:
    """Return a queue with the first sessions of a group of three, as put by an earlier rollouter."""
    queue = InProcessQueue([TaskSpec(name=TRAIN, needs=frozenset({"input_ids"}))])
    queue.issue([PROMPT], num_sessions=3)
    for index, session in enumerate(sessions):
        if session.failure is None:
            queue.put_batch(Batch.from_trajectories(session.trajectories))
        else:
            queue.fail("p0", index, reason=session.failure)
    return queue


def told(folder: Path, queue: InProcessQueue, sessions: Sequence[SessionResult]) -> GroupEvent:
    """Return the rollouter's event for a generated group; it puts only the sessions that the queue lacks."""
    rollouter = RunRollouter(settings_in(folder), queue)
    (unsettled,) = queue.unsettled()
    dispatch = Dispatch(prompt=PROMPT, place=0, sessions=tuple(unsettled.sessions))

    async def settle() -> GroupEvent:
        await rollouter._settle(GroupResult(prompt=PROMPT, sessions=tuple(sessions)), dispatch)
        (event,) = await rollouter.events(wait_s=1.0)
        return event

    return asyncio.run(settle())


def test_a_group_is_as_old_as_its_oldest_token_in_the_queue(tmp_path: Path):
    queue = queue_with(answered(0, version=2))
    event = told(tmp_path, queue, [answered(index, version=5) for index in range(3)])
    assert (event.oldest, event.newest, event.failure) == (2, 5, None)


def test_a_group_whose_missing_sessions_fail_has_those_that_were_put(tmp_path: Path):
    queue = queue_with(answered(0, version=2))
    event = told(tmp_path, queue, [FAILED] * 3)
    assert (event.oldest, event.newest, event.failure) == (2, 2, None)


def test_a_group_without_rows_in_the_queue_has_failed_whatever_was_generated_beside(tmp_path: Path):
    queue = queue_with(FAILED, FAILED)
    event = told(tmp_path, queue, [answered(0, version=5), answered(1, version=5), FAILED])
    assert event.failure == "no rows: the engine fell"
    assert not event.is_refused


def test_a_group_that_is_generated_whole_is_told_as_it_was_generated(tmp_path: Path):
    event = told(tmp_path, queue_with(), [answered(0, version=4), answered(1, version=5), FAILED])
    assert (event.oldest, event.newest, event.failure) == (4, 5, None)
    event = told(tmp_path, queue_with(), [FAILED] * 3)
    assert event.failure == "all sessions failed; the first: the engine fell"


def test_the_report_has_the_oldest_group_and_the_responses_in_the_reward(tmp_path: Path):
    rollouter = RunRollouter(settings_in(tmp_path), queue_with())
    rollout: Any = SimpleNamespace(scorer=SimpleNamespace(num_scoring=4, name="my.py:reward"))
    rollouter.rollout, now = rollout, time.monotonic()
    rollouter._running = {"p1": (now, 0), "p0": (now - 60, 0)}
    assert asyncio.run(rollouter.report()).doing == (
        "2 groups in progress, the oldest p0 for 60 s, 0 responses in 0 engines, 4 in the reward my.py:reward"
    )


class NotingEngine:
    """An engine that records how weights are published."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    async def publish(self, update: Any, **given: Any) -> None:
        """Record the arguments."""
        self.given.append(given)


def test_engines_may_take_as_long_to_end_what_they_have_as_a_group_may(tmp_path: Path):
    engine: Any = NotingEngine()
    rollouter = RunRollouter(settings_in(tmp_path), queue_with())
    rollouter.engine = rollouter.rollout = engine
    asyncio.run(rollouter.publish(an_update(1), a_canary(), EXACT, True))
    (given,) = engine.given
    assert (given["drain"], given["drain_deadline_s"]) == (True, 900.0)


def test_as_many_groups_are_refused_under_one_version_as_its_first_rounds_have(tmp_path: Path):
    """A version has two steps, each with two rounds of two groups: four groups are refused, then all train."""
    settings = settings_in(
        tmp_path,
        rollout={"group_size": 3, "prompts_per_step": 2},
        schedule={"sync_every": 2},
        dynamic_sampling={"filter": "reward_spread", "max_rounds": 2},
    )
    refusals = make_refusals(settings)
    assert refusals is not None
    alike = GroupResult(prompt=PROMPT, sessions=tuple(answered(index, version=0) for index in range(3)))
    for _ in range(2):
        reasons = [refusals.reason(alike) for _ in range(6)]
        assert [reason is None for reason in reasons] == [False] * 4 + [True] * 2
        refusals.updated()
    assert refusals.num_made_up == 4
    failed = GroupResult(prompt=PROMPT, sessions=(FAILED,) * 3)
    assert refusals.reason(failed) is None
