"""A skip cache with different, broken, or too many entries."""

import asyncio
import dataclasses
import itertools
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from entry_forgery import flip
from skip_forgery import KEY, forge, make_entry, path_of
from skip_groups import assert_same_groups, make_groups, make_prompts_of

from rl_core.errors import BrokenEntryError, CacheError, CacheMismatchError, DataError, SettingsError
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin, SkipCache, SkipOptions
from rl_rollout.skip import cache as cache_module

STORED = RolloutOrigin(
    policy={"weights": "abc"},
    tokenizer={"vocabulary": "v1", "template": "t1"},
    sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 16},
    group_size=2,
    loop={"name": "tools", "options": {"limits": {"max_turns": 4}}},
    tools=[{"name": "add"}],
    reward={"function": {"name": "reward.py:score", "content": "aa"}},
    seed=0,
    versions={"rl-core": "0.1.0", "vllm": "0.32.0"},
)
GROUPS = make_groups(seed=1)
PROMPTS = make_prompts_of(GROUPS)
NEW = make_groups(seed=2)

CHANGES = {
    "policy.weights": {"policy": {"weights": "def"}},
    "tokenizer.vocabulary": {"tokenizer": {"vocabulary": "v2", "template": "t1"}},
    "tokenizer.template": {"tokenizer": {"vocabulary": "v1", "template": "t2"}},
    "sampling.temperature": {"sampling": {"temperature": 0.7, "top_p": 1.0, "max_tokens": 16}},
    "sampling.max_tokens": {"sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 32}},
    "sampling.top_k": {"sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "top_k": 5}},
    "group_size": {"group_size": 4},
    "loop.name": {"loop": {"name": "single_turn", "options": {"limits": {"max_turns": 4}}}},
    "loop.options.limits.max_turns": {"loop": {"name": "tools", "options": {"limits": {"max_turns": 8}}}},
    "tools": {"tools": [{"name": "add"}, {"name": "multiply"}]},
    "reward.function.content": {"reward": {"function": {"name": "reward.py:score", "content": "bb"}}},
    "seed": {"seed": 1},
    "versions.vllm": {"versions": {"rl-core": "0.1.0", "vllm": "0.33.0"}},
    "source": {"source": {"prompts": "p1", "groups_per_step": 2}},
}
ESSENTIAL = {"tokenizer.vocabulary"}


class Calls:
    def __init__(self, directory, **options):
        self.events = []
        self.num_generated = 0
        if options.get("action") == "repeat":
            options = {"steps": "1-3", **options}
        self.cache = SkipCache(
            SkipOptions(enabled=True, directory=str(directory), **options),
            on_event=lambda name, **fields: self.events.append((name, fields)),
        )

    def __call__(self, key=KEY, *, circumstances=STORED, prompts=PROMPTS, new=NEW):
        async def generate():
            self.num_generated += 1
            return new

        return asyncio.run(self.cache.rollouts(key, prompts, circumstances, generate))

    def events_named(self, name):
        return [fields for found, fields in self.events if found == name]


@pytest.fixture
def stored(tmp_path):
    Calls(tmp_path)(new=GROUPS)
    return tmp_path


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_circumstances_is_an_error_that_names_it_alone(stored, name):
    calls = Calls(stored)
    with pytest.raises(CacheMismatchError) as caught:
        calls(circumstances=replace(STORED, **CHANGES[name]))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path_of(stored)} was generated with different inputs or settings:"
    assert lines[1].startswith(f"  {name}: stored ")
    assert lines[2].startswith('Set rollout_cache.on_mismatch = "accept"')
    assert calls.num_generated == 0
    assert [fields["on_mismatch"] for fields in calls.events_named("skip_mismatch")] == ["error"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_accepted_and_listed_or_generated_again_in_place(stored, name):
    changed = replace(STORED, **CHANGES[name])
    accepted = Calls(stored, on_mismatch="accept")(circumstances=changed)
    assert [difference.name for difference in accepted.differences] == [name]
    assert_same_groups(accepted.groups, GROUPS)
    again = Calls(stored, on_mismatch="regenerate")
    assert not again(circumstances=changed).is_replayed
    found = Calls(stored)(circumstances=changed)
    assert found.is_replayed
    assert_same_groups(found.groups, NEW)


@pytest.mark.parametrize("action", ["repeat", "repeat_last"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_repeat_asks_only_for_what_training_needs(stored, name, action):
    calls = Calls(stored, action=action)
    changed = replace(STORED, **CHANGES[name])
    if name in ESSENTIAL:
        with pytest.raises(CacheMismatchError, match=name):
            calls(EntryKey(step=4), circumstances=changed)
    else:
        found = calls(EntryKey(step=4), circumstances=changed)
        assert (found.source, found.differences) == (KEY, ())


def test_other_columns_are_never_accepted(stored):
    store = EntryStore(str(stored))
    found = store.describe(KEY).fingerprint
    fingerprint = {**found, "columns": {**found["columns"], "input_ids": "int64"}}
    store.write(KEY, GROUPS, fingerprint=fingerprint, generate_s=1.0, replace=True)
    for action in ("cache", "repeat", "repeat_last"):
        with pytest.raises(CacheMismatchError, match=r"columns\.input_ids") as caught:
            Calls(stored, action=action, on_mismatch="accept")(EntryKey(step=1))
        assert '"accept"' not in str(caught.value)


PROMPT_CHANGES = {
    "tokens": lambda p: replace(p, input_ids=p.input_ids + np.int32(1)),
    "messages": lambda p: replace(p, messages=({"role": "user", "content": "other"},)),
    "ground truth": lambda p: replace(p, ground_truth="other"),
    "source": lambda p: replace(p, data_source="other"),
    "columns": lambda p: replace(p, columns={**p.columns, "difficulty": 99}),
}


@pytest.mark.parametrize("change", PROMPT_CHANGES.values(), ids=PROMPT_CHANGES)
def test_a_change_of_any_part_of_a_prompt_is_found_with_its_place(stored, change):
    with pytest.raises(CacheMismatchError, match=r"2 prompts, 1 of them unchanged; .* is at prompt 1"):
        Calls(stored)(prompts=[PROMPTS[0], change(PROMPTS[1])])


def test_the_order_and_the_number_of_prompts_count_and_their_uids_do_not(stored):
    with pytest.raises(CacheMismatchError, match="the same prompts in another order"):
        Calls(stored)(prompts=PROMPTS[::-1])
    with pytest.raises(CacheMismatchError, match="stored 2 prompts, now 1 prompts, 1 of them"):
        Calls(stored)(prompts=PROMPTS[:1])
    renamed = [replace(prompt, uid=f"other-{prompt.uid}") for prompt in PROMPTS]
    found = Calls(stored)(prompts=renamed)
    assert [group.prompt.uid for group in found.groups] == ["p0-r1", "p1-r1"]


def test_nothing_of_the_live_batch_is_mixed_into_a_hit(stored):
    live = make_prompts_of(make_groups(num_prompts=5, seed=9))
    found = Calls(stored, on_mismatch="accept")(prompts=live)
    unnamed = [
        replace(
            group,
            prompt=replace(group.prompt, uid=group.prompt.uid.removesuffix("-r1")),
            sessions=tuple(
                replace(
                    s,
                    trajectories=tuple(replace(t, prompt_uid=t.prompt_uid.removesuffix("-r1")) for t in s.trajectories),
                )
                for s in group.sessions
            ),
        )
        for group in found.groups
    ]
    live_uids = {prompt.uid for prompt in live}
    kept_uids = {group.prompt.uid for group in found.groups}
    assert_same_groups(unnamed, GROUPS)
    assert not (kept_uids & live_uids)


def test_the_same_weights_may_lie_elsewhere_and_without_a_digest_their_place_counts(tmp_path):
    known = [{"weights": "abc", "origin": "/a", "version": 3}, {"weights": "abc", "origin": "/b", "version": 4}]
    unknown = [{"origin": "/a", "version": 3}, {"origin": "/a", "version": 4}]
    for name, (stored, live) in {"known": known, "unknown": unknown}.items():
        Calls(tmp_path / name)(circumstances=replace(STORED, policy=stored))
        if name == "known":
            assert Calls(tmp_path / name)(circumstances=replace(STORED, policy=live)).is_replayed
        else:
            with pytest.raises(CacheMismatchError, match=r"policy\.version: stored 3, now 4"):
                Calls(tmp_path / name)(circumstances=replace(STORED, policy=live))


def test_circumstances_that_are_no_json_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="the fingerprint part 'loop' must be JSON"):
        Calls(tmp_path)(circumstances=replace(STORED, loop={"name": object()}))


def test_events_and_results_have_the_times_and_sizes(tmp_path, monkeypatch):
    ticks = itertools.count(start=100.0, step=0.123456)
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    tick = pytest.approx(0.123456)
    calls = Calls(tmp_path)
    new = calls(new=GROUPS)
    assert (new.is_replayed, new.load_s, new.generate_s, new.differences) == (False, 0.0, tick, ())
    again = calls()
    assert (again.is_replayed, again.source, again.generate_s) == (True, KEY, tick)
    assert again.load_s == pytest.approx(2 * 0.123456), "the search looks at the clock once in between"
    size_bytes = path_of(tmp_path).stat().st_size
    assert calls.events == [
        ("skip_miss", {"entry": KEY.name}),
        ("skip_stored", {"entry": KEY.name, "size_bytes": size_bytes, "store_s": 0.1235}),
        (
            "skip_hit",
            {
                "entry": KEY.name,
                "wanted": KEY.name,
                "size_bytes": size_bytes,
                "load_s": 0.2469,
                "generate_s": 0.1235,
            },
        ),
    ]


def test_rollouts_that_another_run_stored_meanwhile_or_that_cannot_train_are_not_stored(tmp_path):
    calls, other = Calls(tmp_path), Calls(tmp_path)

    async def generate():
        await other.cache.rollouts(KEY, PROMPTS, STORED, lambda: asyncio.sleep(0, GROUPS))
        return NEW

    assert_same_groups(asyncio.run(calls.cache.rollouts(KEY, PROMPTS, STORED, generate)).groups, NEW)
    assert_same_groups(calls().groups, GROUPS)
    failed = [replace(group, sessions=(SessionResult(failure="broken"),)) for group in NEW]
    calls(EntryKey(step=2), new=failed)
    assert calls.events_named("skip_not_stored") == [
        {"entry": KEY.name, "reason": "another writer stored it first"},
        {"entry": EntryKey(step=2).name, "reason": "no session can train"},
    ]
    assert list(EntryStore(str(tmp_path)).entries()) == [KEY]


def test_repeat_last_takes_training_steps_whose_first_part_is_stored(tmp_path):
    for key in (
        EntryKey(step=1, part=1),
        EntryKey(step=1),
        EntryKey(step=2, part=1),
        EntryKey(step=9, kind="validation"),
    ):
        Calls(tmp_path, validation=True)(key, new=GROUPS)
    calls = Calls(tmp_path, action="repeat_last", validation=True)
    assert calls(EntryKey(step=12)).source == EntryKey(step=1)
    assert calls(EntryKey(step=12, part=1)).source == EntryKey(step=1, part=1)
    assert calls(EntryKey(step=12, part=2)).source is None
    assert calls(EntryKey(step=12, kind="validation")).source is None


@pytest.mark.parametrize(
    ("options", "key", "is_served", "needs_earlier"),
    [
        ({}, {"step": 1}, False, False),
        ({}, {"step": 2}, True, False),
        ({}, {"step": 4}, False, False),
        ({"steps": "1-3"}, {"step": 0}, True, False),
        ({"steps": "2-3"}, {"step": 0}, False, False),
        ({}, {"step": 2, "kind": "validation"}, False, False),
        ({"validation": True}, {"step": 2, "kind": "validation"}, True, False),
        ({"action": "repeat"}, {"step": 1}, False, False),
        ({"action": "repeat"}, {"step": 3}, True, False),
        ({"action": "repeat"}, {"step": 4}, True, True),
        ({"action": "repeat", "validation": True}, {"step": 4, "kind": "validation"}, False, False),
        ({"action": "repeat_last"}, {"step": 2}, True, True),
    ],
)
def test_the_options_choose_the_steps(tmp_path, options, key, is_served, needs_earlier):
    calls = Calls(tmp_path, **{"steps": "2-3", **options})
    assert calls.cache.serves(EntryKey(**key)) == is_served
    assert calls.cache.needs_earlier(EntryKey(**key)) == needs_earlier


@pytest.mark.parametrize(("num_changes", "last"), [(12, "  sampling.k11"), (13, "  and 1 more")])
def test_twelve_differences_are_shown_and_the_others_counted(tmp_path, num_changes, last):
    Calls(tmp_path)(circumstances=replace(STORED, sampling={f"k{index:02}": 0 for index in range(num_changes)}))
    changed = replace(STORED, sampling={f"k{index:02}": 1 for index in range(num_changes)})
    calls = Calls(tmp_path)
    with pytest.raises(CacheMismatchError) as caught:
        calls(circumstances=changed)
    shown = str(caught.value).splitlines()[1:-1]
    assert len(shown) == num_changes
    assert shown[-1].startswith(last)
    accepting = Calls(tmp_path, on_mismatch="accept")
    with structlog.testing.capture_logs() as logs:
        accepting(circumstances=changed)
    assert [len(entry["differences"]) for entry in logs] == [12]


def test_a_broken_entry_is_reported_set_aside_and_generated_again(stored):
    flip(path_of(stored), "rollout_logprobs/c/0")
    calls = Calls(stored)
    assert not calls().is_replayed
    (event,) = calls.events_named("skip_broken")
    assert event["path"].startswith(str(path_of(stored)))
    assert "rollout_logprobs" in event["reason"]
    assert (stored / "broken").is_dir()
    assert event["set_aside_as"].startswith(str(stored / "broken" / KEY.name))
    found = calls()
    assert found.is_replayed
    assert_same_groups(found.groups, NEW)


def test_a_broken_entry_is_an_error_where_that_is_set_and_stays(stored):
    entry = path_of(stored)
    entry.write_bytes(entry.read_bytes()[:-40])
    calls = Calls(stored, on_broken="error")
    with pytest.raises(BrokenEntryError, match=r"train-00000001-0000\.zarr\.zip: "):
        calls()
    assert entry.exists()
    assert calls.num_generated == 0
    assert calls.events_named("skip_broken")[0]["set_aside_as"] is None


def test_repeat_last_passes_over_broken_entries(tmp_path):
    for step in (1, 2, 3):
        Calls(tmp_path)(EntryKey(step=step), new=make_groups(seed=step))
    for step in (1, 3):
        path_of(tmp_path, EntryKey(step=step)).write_bytes(b"{}")
    calls = Calls(tmp_path, action="repeat_last")
    assert calls(EntryKey(step=10)).source == EntryKey(step=2)
    assert calls.num_generated == 0


def test_repeat_generates_a_broken_entry_at_its_turn(tmp_path):
    for step in (1, 2):
        Calls(tmp_path)(EntryKey(step=step), new=make_groups(seed=step))
    path_of(tmp_path).write_bytes(b"{}")
    calls = Calls(tmp_path, action="repeat", steps="1-2")
    assert [calls(EntryKey(step=step)).source for step in (3, 4, 5)] == [None, EntryKey(step=2), EntryKey(step=1)]
    assert calls.num_generated == len(calls.events_named("skip_broken")) == 1


def test_the_oldest_entries_go_first_and_every_other_stays_whole(tmp_path):
    size = None
    for step in range(1, 6):
        calls = Calls(tmp_path, max_bytes=None if size is None else int(size * 3.5))
        calls(EntryKey(step=step), new=GROUPS)
        size = path_of(tmp_path, EntryKey(step=step)).stat().st_size
    store = EntryStore(str(tmp_path))
    assert [key.step for key in store.entries()] == [3, 4, 5]
    assert [fields["entry"] for fields in calls.events_named("skip_removed")] == [EntryKey(step=2).name]
    for key in store.entries():
        assert_same_groups(store.read(key).groups, GROUPS)


def test_an_entry_larger_than_the_limit_is_not_stored_and_nothing_else_goes(stored):
    calls = Calls(stored, max_bytes=30_000)
    calls(EntryKey(step=2), new=make_groups(num_prompts=8, group_size=8, max_tokens=200))
    assert [key.step for key in EntryStore(str(stored)).entries()] == [1]
    assert "exceed max_bytes = 30000" in calls.events_named("skip_not_stored")[0]["reason"]


@pytest.mark.parametrize("action", ["cache", "repeat", "repeat_last"])
def test_an_evaluation_of_another_policy_is_made_again_even_where_mismatches_are_accepted(tmp_path, action):
    key = EntryKey(step=2, kind="validation")
    options = {"action": action, "on_mismatch": "accept", "validation": True}
    Calls(tmp_path, **options)(key, new=GROUPS)
    other = replace(STORED, policy={"weights": "def"})
    assert not Calls(tmp_path, **options)(key, circumstances=other).is_replayed
    found = Calls(tmp_path, **options)(key, circumstances=other)
    assert found.is_replayed
    assert_same_groups(found.groups, NEW)


def test_what_was_just_stored_stays_whatever_the_clock_says(tmp_path, monkeypatch):
    Calls(tmp_path)(EntryKey(step=1), new=GROUPS)
    size = path_of(tmp_path).stat().st_size
    monkeypatch.setattr(time, "time", lambda: 5.0)
    for step in (2, 3):
        Calls(tmp_path, max_bytes=int(size * 1.5))(EntryKey(step=step), new=GROUPS)
        assert [key.step for key in EntryStore(str(tmp_path)).entries()] == [step]


def test_what_is_stored_is_replayed_where_nothing_can_be_written(stored, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert Calls(stored)().is_replayed
    with pytest.raises(CacheError, match="cannot be written by this user"):
        Calls(stored / "empty")


def test_a_cache_that_is_off_asks_nothing_of_its_directory():
    cache = SkipCache(SkipOptions(enabled=False, directory="nosuch://place"))
    assert not cache.serves(EntryKey(step=1))


def test_the_same_nan_is_no_difference(tmp_path):
    circumstances = replace(STORED, sampling={"x": float("nan")})
    Calls(tmp_path)(circumstances=circumstances)
    assert Calls(tmp_path)(circumstances=circumstances).is_replayed


def test_accepted_differences_are_said_once(tmp_path):
    for step in (1, 2):
        Calls(tmp_path)(EntryKey(step=step), new=GROUPS)
    calls = Calls(tmp_path, on_mismatch="accept")
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2):
            calls(EntryKey(step=step), circumstances=replace(STORED, seed=9))
    assert [entry["event"] for entry in logs] == ["skip_mismatch_accepted"]
    assert len(calls.events_named("skip_mismatch")) == 2


@pytest.mark.parametrize(
    "key",
    [{"step": -1}, {"step": 10**12}, {"step": 1, "part": 10**6}, {"step": 1, "kind": "../x"}, {"step": 1, "kind": "A"}],
)
def test_a_key_that_no_folder_can_have_is_refused(key):
    with pytest.raises(DataError, match="an entry's key needs a kind"):
        EntryKey(**key)


def test_prompts_that_cannot_be_stored_are_refused_before_anything_is_generated(tmp_path):
    calls = Calls(tmp_path)
    with pytest.raises(DataError, match="messages, ground truth and columns of prompt 'p0' must be JSON, to be stored"):
        calls(prompts=[replace(PROMPTS[0], columns={"when": np.datetime64("2026-01-01")})])
    assert calls.num_generated == 0


def test_a_search_for_entries_that_are_listed_and_never_there_ends(stored, monkeypatch):
    calls, described = Calls(stored), []
    minutes = itertools.count(step=60.0)
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(perf_counter=lambda: next(minutes)))
    monkeypatch.setattr(EntryStore, "describe", lambda self, key: described.append(key))
    with pytest.raises(CacheError, match=r"no entry for train-00000001-0000 in .* could be opened within 120 s"):
        calls()
    assert described == [KEY], "after one minute, and not after two"
    assert calls.num_generated == 0


def test_an_entry_that_another_run_replaced_while_it_was_read_is_read_again(stored, monkeypatch):
    describe, torn = EntryStore.describe, [BrokenEntryError("entry", "torn")]

    def described(self, key):
        if torn:
            raise torn.pop()
        return describe(self, key)

    monkeypatch.setattr(EntryStore, "describe", described)
    calls = Calls(stored)
    assert calls().is_replayed
    assert (path_of(stored).exists(), calls.events_named("skip_broken")) == (True, [])
    torn.append(BrokenEntryError("entry", "torn"))
    with pytest.raises(BrokenEntryError, match="torn"):
        Calls(stored, on_broken="error")()


def test_rewards_that_are_computed_again_are_no_difference(stored):
    changed = replace(STORED, **CHANGES["reward.function.content"])
    found = Calls(stored, rewards="again")(circumstances=changed)
    assert (found.is_replayed, found.differences) == (True, ())
    with pytest.raises(CacheMismatchError, match="seed: stored 0, now 1"):
        Calls(stored, rewards="again")(circumstances=replace(changed, seed=1))


def test_a_cache_needs_nobody_who_listens(tmp_path):
    async def generate():
        return GROUPS

    cache = SkipCache(SkipOptions(enabled=True, directory=str(tmp_path)))
    found = [asyncio.run(cache.rollouts(KEY, PROMPTS, STORED, generate)).source for _ in range(2)]
    assert found == [None, KEY]


def test_what_cannot_be_stored_is_an_error_that_says_why(tmp_path):
    groups = [replace(GROUPS[0], prompt=replace(GROUPS[0].prompt, columns={"when": np.datetime64("2026-01-01")}))]
    calls = Calls(tmp_path)
    with pytest.raises(CacheError, match=r"rollouts of prompt .p0. cannot be stored: a value of type datetime64"):
        calls(prompts=PROMPTS, new=groups)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_directory_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be created: File exists"):
        Calls(tmp_path / "file")
    with pytest.raises(CacheError, match="nosuch://place cannot be used"):
        Calls("nosuch://place")


def test_entries_of_an_earlier_format_are_refused_by_its_number(stored):
    (stored / "train-00000002-0000").mkdir()
    with pytest.raises(CacheError, match=r"has entries of format 1, such as train-00000002-0000; .* reads format 2"):
        Calls(stored)


def test_an_entry_of_a_later_format_is_refused_by_its_number_and_stays(tmp_path):
    entry = make_entry(tmp_path)
    forge(entry, lambda forgery: forgery.describe(format=3))
    with pytest.raises(CacheError, match=r"train-00000001-0000.zarr.zip has format 3; this version reads format 2"):
        Calls(tmp_path)()
    assert entry.exists()


def test_impossible_options_are_refused_all_at_once():
    with pytest.raises(SettingsError) as caught:
        SkipOptions(action="replay", on_mismatch="no", on_broken="")
    assert len(str(caught.value).splitlines()) == 3
    assert "must be one of 'cache', 'repeat', 'repeat_last'; found 'replay' (str)." in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        SkipCache(SkipOptions(directory="", steps="4-2", max_bytes=0))
    assert len(str(caught.value).splitlines()) == 3


def test_every_part_of_the_circumstances_is_compared():
    names = {field.name for field in dataclasses.fields(RolloutOrigin)}
    assert {name.partition(".")[0] for name in CHANGES} == names
