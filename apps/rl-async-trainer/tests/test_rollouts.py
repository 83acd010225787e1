"""The controller's side of the rollouter: deaths, and groups that no longer exist."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rl_async_trainer.controller.links import RollouterLink
from rl_async_trainer.controller.rollouts import Rollouts
from rl_async_trainer.controller.step_metrics import StepMetrics
from rl_async_trainer.record import FILE, ScheduleHistory, ScheduleRecord
from rl_async_trainer.restoring import PromptPlaces, ReplayScheduler
from rl_async_trainer.settings import AsyncSettings
from rl_core import Batch, InProcessQueue, TaskSpec
from rl_core.cluster import Incarnation, SetUp
from rl_core.errors import RoleDiedError, RolloutError
from rl_core.testing import make_prompts, make_trajectory
from rl_metrics.run_files.json_lines import read_json_lines
from rl_rollout.rollouter.group_events import GroupEvent, refusal
from rl_rollout.schedule import ScheduleOptions, Scheduler
from rl_trainer_parts.rollouts.setup import TRAIN

T = TypeVar("T")
ON_POLICY = ScheduleOptions(groups_per_step=2, num_steps=2, max_staleness=0, sync_every=1)


class MortalRole:
    """A rollouter role whose first incarnation dies once it has returned its events."""

    def __init__(self) -> None:
        self.events: list[GroupEvent] = []
        self.incarnation, self.state, self.death = 1, "serving", None
        self.spec = SimpleNamespace(name="rollouter", rank=0)

    async def set_up(self, work: SetUp) -> None:
        """Keep the work for the restart."""
        self.work = work

    async def outlive(self, number: int, error: RoleDiedError) -> None:
        """Set the next incarnation up."""
        assert number == 1
        self.incarnation = 2
        await self.work(Incarnation(2, error, self.call))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the events, or die."""
        if method == "start":
            return "scripted"
        if self.events:
            events, self.events = self.events, []
            return events
        if self.incarnation == 1:
            raise RoleDiedError("the rollouter was killed.", role="rollouter", rank=0)
        return []


class Side:
    """The controller's side of a rollouter with two groups in flight."""

    def __init__(self, folder: Path, scheduler: Scheduler | None = None) -> None:
        self.folder = folder
        self.role = MortalRole()
        self.scheduler = scheduler or Scheduler(ON_POLICY)
        self.queue = InProcessQueue([TaskSpec(name=TRAIN, needs=frozenset({"input_ids"}))])
        self.record = ScheduleRecord(folder)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.metrics = StepMetrics()
        parts: Any = SimpleNamespace(
            roles={"rollouter": self.role},
            settings=AsyncSettings(policy={"path": "p"}, prompts={"train": "t"}),  # type: ignore[arg-type]
            queue=self.queue,
            scheduler=self.scheduler,
            supply=SimpleNamespace(done=lambda uids: None),
            places=PromptPlaces({}),
            record=self.record,
            progress=lambda what: None,
            lifecycle=SimpleNamespace(say=lambda event, **fields: self.events.append((event, fields))),
        )
        nothing: Callable[[], Any] = lambda: None
        self.rollouts = Rollouts(parts, asyncio.Condition(), self.metrics, teachers=None, on_weights_lost=nothing)
        prompts = make_prompts(2)
        self.queue.issue(prompts, num_sessions=1)
        self.scheduler.issued(prompt.uid for prompt in prompts)
        self.scheduler.started(prompt.uid for prompt in prompts)

    def call(self, ask: Callable[[RollouterLink], Awaitable[T]]) -> T:
        """Call the started rollouter."""

        async def work() -> T:
            await self.rollouts.link.start()
            return await ask(self.rollouts.link)

        return asyncio.run(work())

    def die(self) -> None:
        """Let the rollouter die."""
        self.call(lambda rollouter: rollouter.events())
        self.record.close()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the recorded lines."""
        return list(read_json_lines(self.folder / FILE))


def test_a_group_that_was_refused_before_the_rollouter_died_is_replaced(tmp_path: Path):
    side = Side(tmp_path)
    side.queue.fail("p0", 0, reason=refusal("reward_spread", "all rewards are 1"))
    side.die()
    assert side.scheduler.num_spent == 0
    assert side.scheduler.to_start() == (["p1"], 1)
    assert side.metrics._dropped == {"refused": 1, "lost": 1}


def test_a_group_that_failed_before_the_rollouter_died_is_not_replaced(tmp_path: Path):
    side = Side(tmp_path)
    side.queue.fail("p0", 0, reason="the engine fell")
    side.die()
    assert side.scheduler.num_spent == 1
    assert side.scheduler.to_start() == (["p1"], 0)
    assert side.rollouts.last_failure == "no rows: the engine fell"


def test_of_a_rollouter_that_died_a_step_says_nothing(tmp_path: Path):
    side = Side(tmp_path)
    window = side.call(lambda rollouter: rollouter.window(1))
    assert not any(window.values())
    assert window.keys() == {"metrics", "histograms", "events", "rollouts"}


def test_where_no_group_has_failed_yet_the_last_failure_says_where_to_look(tmp_path: Path):
    assert Side(tmp_path).rollouts.last_failure == "in an earlier launch; see record.jsonl"


def test_a_replay_ends_with_the_first_group_that_it_cannot_have(tmp_path: Path):
    plan = ScheduleHistory(steps={1: ("p1",), 2: ("p0",)}, started={"p0": 0, "p1": 0})
    side = Side(tmp_path, ReplayScheduler(ON_POLICY, plan=plan))
    side.role.events = [GroupEvent(uid="p0", failure="all sessions failed; the first: the skip cache has no entry.")]
    with pytest.raises(RolloutError) as caught:
        asyncio.run(side.rollouts.gather())
    assert str(caught.value).startswith(
        "the recorded run trained group p0 in step 2, but the group failed in the replay: all sessions failed; the "
        "first: the skip cache has no entry. Its entry in the skip cache is missing, or its reward or filter now fails."
    )


def test_a_group_from_a_skip_cache_that_the_queue_had_before_the_rollouter_died_is_not_stale(tmp_path: Path):
    """Its tokens are of version 0, but it was started in version 3."""
    scheduler = Scheduler(replace(ON_POLICY, num_steps=5), served_version=3, num_steps=3)
    side = Side(tmp_path, scheduler)
    side.queue.put_batch(Batch.from_trajectories([make_trajectory("p0", 0)]))
    side.die()
    assert scheduler.stale() == ()
    assert [line["oldest"] for line in side.lines if line["what"] == "settled"] == [None]


def test_groups_whose_generation_ended_with_the_rollouter_are_recorded_as_aborted(tmp_path: Path):
    side = Side(tmp_path)
    side.die()
    (line,) = side.lines
    assert line == {"at": 0, "what": "aborted", "uids": ["p0", "p1"], "reason": "the rollouter was killed."}
    assert side.scheduler.to_start() == (["p0", "p1"], 0)
