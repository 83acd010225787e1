"""Damaged entries are found or harmless; damage never changes the rollouts read."""

import random
import sys
from collections import Counter

import pytest
from entry_forgery import damaged
from skip_forgery import KEY, path_of
from skip_groups import assert_same_groups, make_groups

from rl_core.errors import BrokenEntryError
from rl_rollout.skip import EntryKey, EntryStore

SHORT, LONG = 150, 2_000
FINGERPRINT = {"seed": 1, "policy": {"weights": "abc"}, "sampling": {"temperature": 0.7, "top_p": 1.0}, "tools": None}
GROUPS = make_groups(3, 2, seed=5)


def make(root, *, compress, key=KEY, seed=5):
    store = EntryStore(str(root), compress=compress)
    store.write(key, make_groups(3, 2, seed=seed), fingerprint=FINGERPRINT, generate_s=1.0)
    return store, path_of(root, key)


def outcome(store, manifest):
    """Read a changed entry; return "found" if that is detected, or "harmless" if it reads as before."""
    try:
        found = store.read(KEY)
    except BrokenEntryError as error:
        return "found" if error.path.startswith(store.folder.path_of(KEY.name)) and error.reason else repr(error)
    assert_same_groups(found.groups, GROUPS)
    assert found.manifest == manifest
    return "harmless"


def damage(tmp_path, *, seed, times):
    """Damage entries at random, one at a time; return the counts by damage and outcome."""
    draws, seen = random.Random(seed), Counter()
    entries = [make(tmp_path / str(compress), compress=compress) for compress in (False, True)]
    whole = [(store, entry, entry.read_bytes(), store.read(KEY).manifest) for store, entry in entries]
    for _ in range(times):
        store, entry, content, manifest = draws.choice(whole)
        kind, changed = damaged(draws, content)
        entry.write_bytes(changed)
        seen[kind, outcome(store, manifest)] += 1
        entry.write_bytes(content)
    assert {found for _, found in seen} <= {"found", "harmless"}, seen
    assert seen["flip", "found"] > seen["flip", "harmless"], seen
    return seen


def test_damages_are_found_or_harmless(tmp_path, seed):
    damage(tmp_path, seed=seed, times=SHORT)


@pytest.mark.soak
def test_skip_cache_2000_damages_are_found_or_harmless(tmp_path, seed, capsys):
    seen = damage(tmp_path, seed=seed, times=LONG)
    with capsys.disabled():
        sys.stdout.write(f"\n{LONG} damages, seed {seed}: {dict(seen)}\n")


def test_files_of_entries_exchanged_are_found(tmp_path):
    store, first = make(tmp_path, compress=True)
    _, second = make(tmp_path, compress=True, key=EntryKey(step=2), seed=6)
    spare = first.rename(tmp_path / "spare")
    second.rename(first)
    spare.rename(second)
    for key, other in ((KEY, "train-00000002-0000"), (EntryKey(step=2), "train-00000001-0000")):
        with pytest.raises(BrokenEntryError, match=f"it belongs to {other}"):
            store.read(key)
    first.unlink()
    assert store.read(KEY) is None
