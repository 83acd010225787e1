"""Groups of an asynchronous run, replayed one by one from entries that hold whole steps."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from skip_groups import assert_same_groups, make_groups

from rl_core import Prompt, Trajectory
from rl_core.errors import CacheMismatchError
from rl_rollout.engines import SamplingParams
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.rollouter.group_events import Dispatch
from rl_rollout.rollouter.rollouter import Rollouter, RollouterOptions
from rl_rollout.skip import EntryKey, EntryStore, GroupwiseCache, RolloutOrigin, SkipCache, SkipOptions
from rl_rollout.skip.cache import renamed

DEADLINE_S = 60.0
NUM_SESSIONS = 2
CIRCUMSTANCES = RolloutOrigin(
    policy={"start": "abc", "origin": "policy", "versions": None},
    tokenizer="t",
    sampling=None,
    group_size=NUM_SESSIONS,
    loop=None,
    versions={},
    source={"prompts": "p", "groups_per_step": 2},
)


class Run:
    """A run of two groups a step; the groups of a place are always the same.

    Attributes:
        gates: Generation of these places waits.
    """

    def __init__(self, directory: Path, *, circumstances: RolloutOrigin = CIRCUMSTANCES, **options: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.generated: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        say = lambda name, **fields: self.events.append((name, fields))
        cache = SkipCache(SkipOptions(enabled=True, directory=str(directory), **options), on_event=say)

        async def current() -> RolloutOrigin:
            return circumstances

        self.cache = GroupwiseCache(cache, current, groups_per_step=2, replaces_failed=True)

    async def place(self, place: int, *, is_refused: bool = False, attempt: int = 0) -> GroupResult:
        """Replay or generate the group of a place."""
        uid = f"live{place}" + (f"-again{attempt}" if attempt else "")
        found = await self.cache.find(place, uid)
        group = generated(place, uid) if found is None else found
        if found is None:
            self.generated.append(place)
            if place in self.gates:
                await self.gates[place].wait()
        await self.cache.settled(place, group, is_refused=is_refused, is_replayed=found is not None)
        return group

    def places(self, *places: int) -> list[GroupResult]:
        async def together() -> list[GroupResult]:
            return list(await asyncio.gather(*(self.place(place) for place in places)))

        return finished(together)

    def told(self, name: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.events if found == name]


def generated(place: int, uid: str) -> GroupResult:
    (group, *_) = make_groups(seed=place)
    return renamed(group, uid)


def finished(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def stored(directory: Path) -> dict[int, list[str]]:
    store = EntryStore(str(directory))
    return {key.step: [group.prompt.uid for group in store.read(key).groups] for key in store.entries()}


def test_a_step_is_stored_once_all_its_groups_are_there_in_the_order_of_their_places(tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def work() -> None:
        run.gates[0] = asyncio.Event()
        first = asyncio.create_task(run.place(0))
        await asyncio.gather(run.place(1), run.place(2))
        assert stored(tmp_path) == {}
        run.gates[0].set()
        await first

    finished(work)
    assert stored(tmp_path) == {1: ["live0", "live1"]}
    assert EntryStore(str(tmp_path)).describe(EntryKey(step=1)).fingerprint["policy"]["versions"] == [3, 3]


def test_a_replay_stands_in_for_the_prompt_of_its_place(tmp_path: Path) -> None:
    Run(tmp_path).places(0, 1, 2, 3)
    again = Run(tmp_path)
    found = again.places(0, 1, 2, 3)
    assert again.generated == []
    assert_same_groups(found, [generated(place, f"live{place}") for place in range(4)])
    assert [fields["entry"] for fields in again.told("skip_hit")] == ["train-00000001-0000", "train-00000002-0000"]


def test_time_decides_about_prompts_and_versions_so_they_are_not_compared(tmp_path: Path) -> None:
    Run(tmp_path).places(0, 1)
    moved = replace(CIRCUMSTANCES, policy={"start": "abc", "origin": "elsewhere", "versions": None})
    assert Run(tmp_path, circumstances=moved).places(0)[0].trajectories
    for name, other in {
        "policy.start": replace(CIRCUMSTANCES, policy={"start": "def", "origin": "policy", "versions": None}),
        "source.prompts": replace(CIRCUMSTANCES, source={"prompts": "q", "groups_per_step": 2}),
    }.items():
        with pytest.raises(CacheMismatchError, match=f"\n  {name}: stored"):
            Run(tmp_path, circumstances=other).places(0)


def test_a_refused_group_is_not_stored_and_its_replacement_is(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        await run.place(0, is_refused=True)
        await run.place(1)
        await run.place(0, attempt=1)

    run = Run(tmp_path)
    finished(lambda: work(run))
    assert stored(tmp_path) == {1: ["live0-again1", "live1"]}
    again = Run(tmp_path)
    finished(lambda: work(again))
    assert again.generated == [0], "the entry has no other group for a place whose group was refused again"
    assert stored(tmp_path) == {1: ["live0-again1", "live1"]}


def test_a_failed_group_is_stored_only_if_nothing_replaces_it(tmp_path: Path) -> None:
    failed = GroupResult(
        prompt=generated(0, "live0").prompt, sessions=(SessionResult(failure="the tool hangs"),) * NUM_SESSIONS
    )

    async def work(run: Run) -> None:
        for place, group in enumerate((failed, generated(1, "live1"))):
            assert await run.cache.find(place, f"live{place}") is None
            await run.cache.settled(place, group, is_refused=False, is_replayed=False)

    finished(lambda: work(Run(tmp_path)))
    assert stored(tmp_path) == {}
    on_policy = Run(tmp_path)
    on_policy.cache._replaces_failed = False
    finished(lambda: work(on_policy))
    assert stored(tmp_path) == {1: ["live0", "live1"]}


def test_steps_after_the_range_wait_until_it_is_stored(tmp_path: Path) -> None:
    run = Run(tmp_path, action="repeat", steps="1-2")

    async def work() -> list[GroupResult]:
        run.gates[1] = asyncio.Event()
        tasks = [asyncio.create_task(run.place(place)) for place in range(7)]
        await asyncio.gather(tasks[0], tasks[2], tasks[3])
        assert not tasks[4].done()
        run.gates[1].set()
        return list(await asyncio.gather(*tasks[4:]))

    found = finished(work)
    assert_same_groups(found, [generated(0, "live4"), generated(1, "live5"), generated(2, "live6")])
    assert sorted(run.generated) == [0, 1, 2, 3]


def test_repeat_last_repeats_the_step_before(tmp_path: Path) -> None:
    run = Run(tmp_path, action="repeat_last")
    assert_same_groups(run.places(0, 1, 2, 3)[2:], [generated(0, "live2"), generated(1, "live3")])
    assert sorted(run.generated) == [0, 1]


def test_a_step_is_in_the_queue_before_its_repetition(tmp_path: Path) -> None:
    order: list[str] = []
    is_overtaken = threading.Event()

    def put(pairs: Sequence[tuple[Prompt, Trajectory]]) -> None:
        uid = pairs[0][0].uid
        if uid == "live1":
            is_overtaken.wait(0.3)
        elif uid != "live0":
            is_overtaken.set()
        order.append(uid)

    async def generate(prompts: Sequence[Prompt], **_: Any) -> list[GroupResult]:
        uid = prompts[0].uid
        return [generated(int(uid.removeprefix("live")), uid)]

    options = RollouterOptions(group_size=NUM_SESSIONS, sampling=SamplingParams(max_tokens=4))
    rollouter = Rollouter(cast(Any, None), options, put=put)
    rollouter.engine = rollouter.rollout = cast(Any, SimpleNamespace(run=generate))
    rollouter.stored = Run(tmp_path, action="repeat_last").cache
    prompts = [generated(place, f"live{place}").prompt for place in range(4)]
    sessions = tuple(range(NUM_SESSIONS))
    dispatches = [Dispatch(prompt=prompt, place=place, sessions=sessions) for place, prompt in enumerate(prompts)]
    finished(lambda: rollouter._generate(dispatches))
    assert order == ["live0", "live1", "live2", "live3"]


def test_a_step_whose_groups_came_from_an_earlier_process_is_given_up_and_nothing_waits_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path, action="repeat", steps="1-2")
    found = run.places(*range(1, 9))
    assert_same_groups(found[5:], [generated(2, "live6"), generated(3, "live7"), generated(4, "live8")])
    assert sorted(run.generated) == [1, 2, 3, 4, 5], "the first step to repeat it makes its entry"
    assert stored(tmp_path) == {1: ["live4", "live5"], 2: ["live2", "live3"]}
    (fields,) = run.told("skip_not_stored")
    assert fields == {
        "entry": "train-00000001-0000",
        "reason": "only 1 of its 2 groups were generated after the rollouter's start",
    }


def test_a_resumed_run_replays_the_rest_of_a_step(tmp_path: Path) -> None:
    Run(tmp_path).places(0, 1, 2, 3)
    run = Run(tmp_path)
    run.places(1, 2, 3)
    run.places(0)  # was dropped as stale
    assert run.generated == []
    assert run.told("skip_not_stored") == []


def test_an_ending_run_reports_the_steps_that_it_does_not_store(tmp_path: Path) -> None:
    Run(tmp_path).places(0, 1)
    run = Run(tmp_path)
    run.places(0, 2)
    run.cache.give_up_rest()
    (fields,) = run.told("skip_not_stored")
    assert fields == {"entry": "train-00000002-0000", "reason": "the run ended when 1 of its 2 groups were generated"}


def test_entries_with_other_numbers_of_groups_or_sessions_cannot_stand_in(tmp_path: Path) -> None:
    Run(tmp_path).places(0, 1)
    other = replace(CIRCUMSTANCES, group_size=NUM_SESSIONS + 1)
    with pytest.raises(CacheMismatchError, match="groups: stored 2 groups of 2 sessions, now 2 groups of 3 sessions"):
        Run(tmp_path, circumstances=other, on_mismatch="accept").places(0)
