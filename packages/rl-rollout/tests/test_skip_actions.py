"""The cache entry that each step uses: actions over several steps, with restarts."""

import asyncio
from pathlib import Path

import pytest
from skip_groups import assert_same_groups, make_groups, make_prompts_of

from rl_core.errors import RolloutError
from rl_core.files.array_entries import SUFFIX
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.rollout import GroupResult
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin, SkipCache, SkipOptions, StepRollouts
from rl_rollout.skip.cache import renamed

CIRCUMSTANCES = RolloutOrigin(policy=None, tokenizer="t", sampling=None, group_size=2, loop=None, versions={})


class Runs:
    """Runs that share one cache; a step's rollouts are generated from its number."""

    def __init__(self, directory: Path, **options):
        self.options = {"enabled": True, "directory": str(directory), **options}
        self.generated: list[int] = []
        self.events: list[tuple[str, dict]] = []
        self.start()

    def start(self, **options) -> None:
        """Start again, as a resumed run does."""
        self.options |= options
        self.cache = SkipCache(SkipOptions(**self.options), on_event=lambda name, **fields: self._say(name, fields))

    def _say(self, name: str, fields: dict) -> None:
        self.events.append((name, fields))

    def step(self, step: int, **key) -> StepRollouts:
        return asyncio.run(self.call(EntryKey(step=step, **key)))

    async def call(self, key: EntryKey) -> StepRollouts:
        groups = make_groups(seed=key.step)

        async def generate():
            self.generated.append(key.step)
            return groups

        return await self.cache.rollouts(key, make_prompts_of(groups), CIRCUMSTANCES, generate)

    def sources(self, steps) -> list[int | None]:
        """Return the step whose stored rollouts each step uses; None if they were generated."""
        found = [self.step(step) for step in steps]
        return [None if each.source is None else each.source.step for each in found]

    def named(self, *names: str) -> list[str]:
        return [name for name, _ in self.events if name in names]


def test_cache_stores_every_step_and_gives_each_its_own_back_also_after_a_new_start(tmp_path):
    runs = Runs(tmp_path)
    assert runs.sources(range(1, 6)) == [None] * 5
    runs.start()
    assert runs.sources(range(4, 11)) == [4, 5, None, None, None, None, None]
    runs.start()
    assert runs.sources(range(1, 11)) == list(range(1, 11))
    assert runs.generated == list(range(1, 11))
    assert_same_groups(runs.step(7).groups, make_groups(seed=7))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [("2-3", [None, 2, 3, None]), ([3], [None, None, 3, None]), ("all", [1, 2, 3, 4]), ("1,3-", [1, None, 3, 4])],
)
def test_steps_that_are_not_selected_run_normally_and_are_not_stored(tmp_path, steps, expected):
    runs = Runs(tmp_path, steps=steps)
    runs.sources(range(1, 5))
    assert sorted(key.name for key in _keys(tmp_path)) == [EntryKey(step=s).name for s in expected if s]
    assert runs.sources(range(1, 5)) == expected


def test_repeat_stores_its_range_and_every_later_step_replays_it_in_order(tmp_path):
    runs = Runs(tmp_path, action="repeat", steps="1-3")
    assert runs.sources(range(1, 6)) == [None, None, None, 1, 2]
    runs.start()
    assert runs.sources(range(6, 12)) == [3, 1, 2, 3, 1, 2], "a resumed run takes the next one"
    runs.start()
    assert runs.sources(range(1, 8)) == [1, 2, 3, 1, 2, 3, 1], "the range is stored from the start"
    assert runs.generated == [1, 2, 3]
    assert [key.step for key in _keys(tmp_path)] == [1, 2, 3]


def test_repeat_ignores_entries_outside_its_range(tmp_path):
    Runs(tmp_path).sources(range(1, 7))
    runs = Runs(tmp_path, action="repeat", steps="2,4")
    assert runs.sources(range(1, 9)) == [None, 2, None, 4, 2, 4, 2, 4]
    assert runs.generated == [1, 3]


def test_repeat_generates_a_lost_entry_at_its_turn_and_keeps_the_order(tmp_path):
    runs = Runs(tmp_path, action="repeat", steps="1,3-4")
    assert runs.sources(range(1, 7)) == [None, None, None, None, 1, 3]
    (tmp_path / f"{EntryKey(step=3).name}{SUFFIX}").unlink()
    runs.start()
    assert runs.sources(range(7, 15)) == [4, 1, None, 4, 1, 3, 4, 1]
    assert runs.generated == [1, 2, 3, 4, 9]
    assert [key.step for key in _keys(tmp_path)] == [1, 3, 4]
    assert_same_groups(
        runs.step(12).groups, [renamed(group, f"{group.prompt.uid}-r12") for group in make_groups(seed=9)]
    )


@pytest.mark.parametrize("steps", ["all", "100-", "1-3,7-"])
def test_repeat_without_an_end_is_refused_with_what_to_set(steps):
    (problem,) = SkipOptions(action="repeat", steps=steps).problems()
    assert problem.endswith(f'found steps = {steps!r}. Set steps = "1-3" to repeat the first three.')


def test_repeat_last_takes_the_entry_that_was_made_last_and_its_own_where_there_is_one(tmp_path):
    runs = Runs(tmp_path)
    for step in (5, 9, 2):
        runs.step(step)
    runs.start(action="repeat_last")
    assert runs.sources([1, 2, 5, 6, 9, 10]) == [2, 2, 5, 2, 9, 2]
    empty = Runs(tmp_path / "empty", action="repeat_last")
    assert empty.sources(range(1, 6)) == [None, 1, 1, 1, 1]


def test_a_replay_of_another_step_keeps_its_prompts_under_uids_of_its_own(tmp_path):
    Runs(tmp_path).step(1)
    runs = Runs(tmp_path, action="repeat", steps=1)
    uids = [group.prompt.uid for step in (2, 3) for group in runs.step(step).groups]
    assert uids == ["p0-r2", "p1-r2", "p0-r3", "p1-r3"]
    (stored,) = {tuple(group.prompt.ground_truth for group in runs.step(step).groups) for step in (1, 2, 3)}
    assert stored == ("p0", "p1")
    rows = [(group.prompt.uid, row.prompt_uid) for group in runs.step(2).groups for row in group.trajectories]
    assert rows
    assert [uid for uid, _ in rows] == [uid for _, uid in rows]
    assert [group.prompt.uid for group in runs.step(1).groups] == ["p0", "p1"]


def test_parts_of_a_step_and_kinds_have_entries_of_their_own(tmp_path):
    runs = Runs(tmp_path, validation=True)
    for key in ({"part": 0}, {"part": 1}, {"kind": "validation"}, {"kind": "test"}):
        assert runs.step(2, **key).source is None
        assert runs.step(2, **key).source == EntryKey(step=2, **key)
    assert runs.generated == [2] * 4


def test_a_part_without_an_entry_never_takes_that_of_another_part(tmp_path):
    Runs(tmp_path).step(1)
    runs = Runs(tmp_path, action="repeat", steps=1)
    assert runs.step(2).source == EntryKey(step=1)
    assert runs.step(2, part=1).source is None


def test_parts_of_a_repeated_step_are_those_of_one_step(tmp_path):
    first = Runs(tmp_path)
    for step, parts in ((1, 2), (2, 1), (3, 2)):
        for part in range(parts):
            first.step(step, part=part)
    runs = Runs(tmp_path, action="repeat", steps="1-3")
    found = [[runs.step(step, part=part).source for part in (0, 1)] for step in (4, 5, 6, 7)]
    assert [[None if source is None else (source.step, source.part) for source in each] for each in found] == [
        [(1, 0), (1, 1)],
        [(2, 0), None],
        [(3, 0), (3, 1)],
        [(1, 0), (1, 1)],
    ]
    uids = [group.prompt.uid for group in runs.step(7, part=1).groups]
    assert uids == ["p0-r7.1", "p1-r7.1"]


@pytest.mark.parametrize("action", ["repeat", "repeat_last"])
def test_an_evaluation_is_never_that_of_another_step(tmp_path, action):
    first = Runs(tmp_path, validation=True)
    first.step(0, kind="validation")
    runs = Runs(tmp_path, action=action, steps="1-9", validation=True)
    assert runs.step(0, kind="validation").is_replayed
    assert runs.step(4, kind="validation").source is None
    assert runs.step(4, kind="validation").is_replayed


def test_validation_is_never_cached_unless_asked(tmp_path):
    runs = Runs(tmp_path)
    for kind in ("validation", "test"):
        assert [runs.step(step, kind=kind).source for step in (0, 1, 1)] == [None] * 3
    assert _keys(tmp_path) == []
    runs.start(validation=True, steps="1-4")
    assert [runs.step(step, kind="validation").is_replayed for step in (0, 0, 4, 4, 5, 5)] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]


def test_a_cache_that_is_off_touches_nothing(tmp_path):
    runs = Runs(tmp_path / "none", enabled=False)
    assert runs.sources([1, 1]) == [None, None]
    assert not (tmp_path / "none").exists()
    assert runs.events == []


def test_feeds_that_overlap_and_settle_in_any_order_are_stored_by_their_place_in_the_feed(tmp_path):
    async def feed(runs: Runs, order: list[int]) -> dict[int, StepRollouts]:
        gates = {index: asyncio.Event() for index in order}

        async def one(index: int) -> StepRollouts:
            async def generate():
                await gates[index].wait()
                return make_groups(seed=index)

            prompts = make_prompts_of(make_groups(seed=index))
            return await runs.cache.rollouts(EntryKey(step=index), prompts, CIRCUMSTANCES, generate)

        tasks = {index: asyncio.create_task(one(index)) for index in sorted(order)}
        for index in order:
            gates[index].set()
            await tasks[index]
        return {index: task.result() for index, task in tasks.items()}

    runs = Runs(tmp_path)
    first = asyncio.run(feed(runs, [3, 1, 4, 2]))
    runs.start()
    again = asyncio.run(feed(runs, [2, 4, 3, 1]))
    for index in range(1, 5):
        assert not first[index].is_replayed
        assert again[index].source == EntryKey(step=index)
        assert_same_groups(again[index].groups, make_groups(seed=index))


def test_rollouts_that_failed_or_were_cancelled_are_not_stored(tmp_path):
    runs = Runs(tmp_path)
    prompts = make_prompts_of(make_groups())

    async def raises():
        raise RolloutError("no")

    async def cancelled():
        raise asyncio.CancelledError

    async def all_failed():
        failed = SessionResult(failure="the tool hangs")
        return [GroupResult(prompt=prompt, sessions=(failed, failed)) for prompt in prompts]

    for generate, error, says in ((raises, RolloutError, "no"), (cancelled, asyncio.CancelledError, "")):
        with pytest.raises(error, match=f"^{says}$"):
            asyncio.run(runs.cache.rollouts(EntryKey(step=1), prompts, CIRCUMSTANCES, generate))
    found = asyncio.run(runs.cache.rollouts(EntryKey(step=1), prompts, CIRCUMSTANCES, all_failed))
    assert [len(group.failures) for group in found.groups] == [2, 2]
    assert _keys(tmp_path) == []
    assert runs.events[-1] == (
        "skip_not_stored",
        {"entry": "train-00000001-0000", "reason": "no session can train"},
    )
    assert runs.sources([1, 1]) == [None, 1]


def test_events_tell_hits_misses_and_bytes(tmp_path):
    runs = Runs(tmp_path)
    runs.step(1)
    runs.step(1)
    assert [name for name, _ in runs.events] == ["skip_miss", "skip_stored", "skip_hit"]
    stored, hit = runs.events[1][1], runs.events[2][1]
    (entry,) = tmp_path.iterdir()
    assert stored["entry"] == hit["entry"] == "train-00000001-0000"
    assert stored["size_bytes"] == hit["size_bytes"] == entry.stat().st_size
    assert hit["load_s"] > 0
    assert stored["store_s"] > 0


def _keys(directory: Path) -> list[EntryKey]:
    return EntryStore(str(directory)).entries()
