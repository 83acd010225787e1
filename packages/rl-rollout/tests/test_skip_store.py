"""Entries that cannot be stored or removed, and the order of removal."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import skip_full_disk
from skip_forgery import KEY, forge, path_of
from skip_groups import assert_same_groups, make_groups, make_prompts_of

from rl_core.errors import BrokenEntryError, CacheError
from rl_core.files.array_entries import EntryTooLargeError
from rl_rollout.skip import EntryKey, EntryStore, RolloutOrigin, SkipCache, SkipOptions

GROUPS = make_groups(2, 2)
FILE_LIMIT_BYTES = 16_384


def write(store, step=1, groups=GROUPS, **arguments):
    return store.write(EntryKey(step=step), groups, fingerprint={}, generate_s=1.0, **arguments)


def tree_bytes(root):
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def steps(store):
    return [key.step for key in store.entries()]


@pytest.fixture
def aged(tmp_path):
    """Make a store with five entries of the same size, from newest to oldest."""
    store = EntryStore(str(tmp_path))
    for step in range(1, 6):
        write(store, step)
        created_at = 1_000_000.0 - step
        forge(path_of(tmp_path, EntryKey(step=step)), lambda forgery, at=created_at: forgery.describe(created_at=at))
    return store


NAMES = {
    "train-00000007-0001": EntryKey(step=7, part=1),
    "validation-00000000-0000": EntryKey(kind="validation", step=0),
    "train-123456789012-12345": EntryKey(step=123456789012, part=12345),
    "train-7-0": None,
    "train-00000007": None,
    "train-00000007-00001": None,  # one digit too many in the last part
    "Train-00000007-0000": None,
    "-00000007-0000": None,
    "train-00000007-0000\n": None,
    "train-00000007-0000.tmp": None,
    ".writing-train-00000007-0000-0123456789abcdef": None,
    "broken": None,
    "../train-00000007-0000": None,
    "train-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667-0000": None,
    f"{'a' * 40}-00000007-0000": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_entries_say_their_keys(name):
    key = NAMES[name]
    assert EntryKey.parse(name) == key
    assert key is None or key.name == name


def test_a_full_disk_is_named_with_what_to_do_and_leaves_nothing(tmp_path):
    store = EntryStore(str(tmp_path))
    write(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, hard))
    try:
        for step, is_replaced in ((2, False), (1, True)):
            with pytest.raises(CacheError, match=r"could not be stored: .*File too large.*Make room") as caught:
                write(store, step, make_groups(8, 8, max_tokens=200), replace=is_replaced)
            assert str(path_of(tmp_path, EntryKey(step=step))) in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [path_of(tmp_path)]
    assert_same_groups(store.read(KEY).groups, GROUPS)


def test_a_disk_that_is_full_at_any_point_leaves_nothing(tmp_path):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets us mount nothing")
    script = Path(skip_full_disk.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    command = ["unshare", "-m", sys.executable, str(script), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    if found.returncode == skip_full_disk.NO_MOUNT:
        pytest.skip("this system lets us mount no disk of memory")
    assert found.returncode == 0, found.stderr
    outcomes = [json.loads(line) for line in found.stdout.splitlines()]
    failed = [outcome for outcome in outcomes if outcome["error"]]
    assert 1 < len(failed) < len(outcomes), "the disks are all too small, or all large enough"
    assert all("No space left on device" in outcome["error"] for outcome in failed)
    assert not any(outcome["left"] for outcome in failed)
    assert [o for o in outcomes if not o["error"] and o["left"] != [path_of(tmp_path).name]] == []


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), lambda path: path.symlink_to(path)])
def test_a_directory_that_is_none_is_refused_at_the_start(tmp_path, make):
    place = tmp_path / "cache"
    make(place)
    with pytest.raises(CacheError, match=r"cache cannot be created: .*Choose another folder"):
        SkipCache(SkipOptions(enabled=True, directory=str(place)))
    with pytest.raises(CacheError, match=r"could not be stored: .*choose another folder"):
        write(EntryStore(str(place)))


def test_pruning_removes_the_oldest_first_and_no_more_than_it_must(aged, tmp_path):
    one = tree_bytes(tmp_path) // 5
    assert aged.prune(5 * one + 100) == []
    would = aged.prune(3 * one + 100, is_dry_run=True)
    assert steps(aged) == [1, 2, 3, 4, 5]
    assert aged.prune(3 * one + 100) == would
    assert [name for name, _ in would] == ["train-00000005-0000", "train-00000004-0000"]
    assert steps(aged) == [1, 2, 3]
    assert tree_bytes(tmp_path) <= 3 * one + 100
    for step in steps(aged):
        assert_same_groups(aged.read(EntryKey(step=step)).groups, GROUPS)
    aged.prune(1)
    assert list(tmp_path.iterdir()) == []


def test_pruning_removes_what_was_set_aside_first_and_then_broken_entries(aged, tmp_path):
    total, one = tree_bytes(tmp_path), tree_bytes(tmp_path) // 5
    aged.folder.set_aside(EntryKey(step=1).name)
    assert tree_bytes(tmp_path) == total
    (aside,) = aged.folder.broken()
    path_of(tmp_path, EntryKey(step=2)).write_bytes(b"{}")
    removed = [name for name, _ in aged.prune(2 * one + 100)]
    assert removed == [f"broken/{aside}", "train-00000002-0000", "train-00000005-0000"]
    assert steps(aged) == [3, 4]


def test_an_entry_that_is_larger_than_all_room_is_not_stored_and_removes_nothing(tmp_path):
    store = EntryStore(str(tmp_path))
    size = write(store)
    with pytest.raises(EntryTooLargeError, match="would exceed max_bytes"):
        write(store, 2, max_bytes=size - 30)
    assert list(tmp_path.iterdir()) == [path_of(tmp_path)]
    assert write(store, 2, max_bytes=size + 30) is not None


def test_a_step_that_just_fits_stays_and_the_others_go(tmp_path):
    run_step(SkipCache(SkipOptions(enabled=True, directory=str(tmp_path / "probe"))), 1)
    room = tree_bytes(tmp_path / "probe") + 100
    events = []
    options = SkipOptions(enabled=True, directory=str(tmp_path / "cache"), max_bytes=room)
    cache = SkipCache(options, on_event=lambda event, **fields: events.append((event, fields.get("entry"))))
    store = EntryStore(options.directory)
    for step in (1, 2, 3):
        assert run_step(cache, step).source is None
        assert steps(store) == [step]
        assert tree_bytes(tmp_path / "cache") <= room
    assert events.count(("skip_removed", "train-00000001-0000")) == 1
    cache = SkipCache(replace(options, max_bytes=room - 1000))
    run_step(cache, 4)
    assert steps(store) == [3]


def run_step(cache, step):
    async def generate():
        return GROUPS

    made_of = RolloutOrigin(policy="p", tokenizer="t", sampling={}, group_size=2, loop="l", versions={})
    return asyncio.run(cache.rollouts(EntryKey(step=step), make_prompts_of(GROUPS), made_of, generate))


def test_an_entry_that_would_not_be_read_is_not_stored(tmp_path):
    with pytest.raises(CacheError, match=r"need \d+ bytes or more; at most 100"):
        write(EntryStore(str(tmp_path), max_entry_bytes=100))
    with pytest.raises(CacheError, match=r"description has .* values; at most"):
        EntryStore(str(tmp_path)).write(KEY, GROUPS, fingerprint={"x": [0] * 600_000}, generate_s=1.0)
    assert list(tmp_path.iterdir()) == []
    write(EntryStore(str(tmp_path)))
    with pytest.raises(BrokenEntryError, match="the limit is 1000 bytes"):
        EntryStore(str(tmp_path), max_entry_bytes=1000).read(KEY)


def test_no_groups_are_an_entry_too(tmp_path):
    store = EntryStore(str(tmp_path))
    write(store, groups=[])
    assert store.read(KEY).groups == ()


@pytest.mark.parametrize("compress", [False, True])
def test_a_replayed_array_can_be_written_to_as_a_new_one_can(tmp_path, compress):
    store = EntryStore(str(tmp_path), compress=compress)
    write(store)
    row = store.read(KEY).groups[0].trajectories[0]
    assert all(getattr(row, name).flags.writeable for name in ("input_ids", "loss_mask", "rollout_logprobs"))
    assert isinstance(row.input_ids, np.ndarray)
