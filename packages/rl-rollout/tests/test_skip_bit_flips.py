"""Random bit flips, cuts and swaps of files are detected or harmless; they never change the rollouts read."""

import random
import shutil
import sys
from pathlib import Path

import pytest
from skip_forgery import KEY
from skip_groups import assert_same_groups, make_groups

from rl_core.errors import BrokenEntryError
from rl_rollout.skip import EntryKey, EntryStore

SHORT_FLIPS, LONG_FLIPS = 300, 5000
FINGERPRINT = {"seed": 1, "policy": {"weights": "abc"}, "sampling": {"temperature": 0.7, "top_p": 1.0}, "tools": None}
GROUPS = make_groups(3, 2, seed=5)


def make(root, *, compress, seed=5):
    store = EntryStore(str(root), compress=compress)
    groups = GROUPS if seed == 5 else make_groups(3, 2, seed=seed)
    store.write(KEY, groups, fingerprint=FINGERPRINT, generate_s=1.0)
    return store, root / KEY.name


def files_of(entry):
    return sorted(path for path in entry.rglob("*") if path.is_file())


def outcome(store, manifest):
    """Read a changed entry; return "broken" if that is detected, or "harmless" if it reads as before."""
    try:
        found = store.read(KEY)
    except BrokenEntryError as error:
        return "broken" if error.path.startswith(store.folder.path_of(KEY.name)) and error.reason else repr(error)
    assert_same_groups(found.groups, GROUPS)
    assert found.manifest == manifest
    return "harmless"


def flip(draws, content):
    place, bit = draws.randrange(len(content)), draws.randrange(8)
    return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]


def cut(draws, content):
    return content[: draws.randrange(len(content))]


def damage(tmp_path, *, seed, times):
    """Damage files of entries, one at a time; return the counts by file name, damage and outcome."""
    draws = random.Random(seed)
    entries = [make(tmp_path / str(compress), compress=compress) for compress in (False, True)]
    manifests = [store.read(KEY).manifest for store, _ in entries]
    seen = {}
    for _ in range(times):
        which = draws.randrange(2)
        store, entry = entries[which]
        path = draws.choice(files_of(entry))
        change = flip if draws.random() < 0.75 else cut
        content = path.read_bytes()
        path.write_bytes(change(draws, content))
        kind = path.name if path.suffix else "chunk"
        found = (kind, change.__name__, outcome(store, manifests[which]))
        seen[found] = seen.get(found, 0) + 1
        path.write_bytes(content)
    for (store, _), manifest in zip(entries, manifests, strict=True):
        assert outcome(store, manifest) == "harmless"
    return seen


def check(seen):
    assert {each[2] for each in seen} <= {"broken", "harmless"}
    assert not [each for each in seen if each[2] == "harmless" and each[0] != "manifest.json"], "a file was not checked"
    assert {each[:2] for each in seen} == {
        (kind, change) for kind in ("manifest.json", "zarr.json", "chunk") for change in ("flip", "cut")
    }


def test_flipped_bits_and_cuts_are_found_or_harmless(tmp_path, seed):
    check(damage(tmp_path, seed=seed, times=SHORT_FLIPS))


@pytest.mark.soak
def test_skip_cache_5000_flipped_bits_and_cuts_are_found_or_harmless(tmp_path, seed, capsys):
    seen = damage(tmp_path, seed=seed, times=LONG_FLIPS)
    with capsys.disabled():
        sys.stdout.write(f"\n{LONG_FLIPS} flips and cuts, seed {seed}: {seen}\n")
    check(seen)


@pytest.mark.parametrize("compress", [False, True])
def test_every_file_is_needed(tmp_path, compress):
    store, entry = make(tmp_path, compress=compress)
    manifest = store.read(KEY).manifest
    for path in files_of(entry):
        content = path.read_bytes()
        path.unlink()
        assert outcome(store, manifest) == "broken", path
        path.write_bytes(content)
    assert outcome(store, manifest) == "harmless"


@pytest.mark.parametrize("compress", [False, True])
def test_two_files_exchanged_are_found_unless_they_are_equal(tmp_path, compress):
    store, entry = make(tmp_path, compress=compress)
    manifest = store.read(KEY).manifest
    files = files_of(entry)
    for index, a in enumerate(files):
        for b in files[:index]:
            first, second = a.read_bytes(), b.read_bytes()
            a.write_bytes(second)
            b.write_bytes(first)
            assert outcome(store, manifest) == ("harmless" if first == second else "broken"), (a, b)
            a.write_bytes(first)
            b.write_bytes(second)


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_of_another_entry_of_the_same_sizes_is_found(tmp_path, compress):
    store, entry = make(tmp_path / "a", compress=compress)
    _, other = make(tmp_path / "b", compress=compress, seed=6)
    manifest = store.read(KEY).manifest
    for path in files_of(entry):
        place = path.relative_to(entry)
        (source,) = other.glob("/".join("arrays-*" if part.startswith("arrays-") else part for part in place.parts))
        content = path.read_bytes()
        path.write_bytes(source.read_bytes())
        assert outcome(store, manifest) == ("harmless" if source.read_bytes() == content else "broken"), place
        path.write_bytes(content)


def test_a_link_to_a_good_copy_is_refused(tmp_path):
    store, entry = make(tmp_path / "cache", compress=True)
    manifest = store.read(KEY).manifest
    for path in files_of(entry):
        copy = tmp_path / "copy"
        shutil.move(path, copy)
        path.symlink_to(copy)
        assert outcome(store, manifest) == "broken", path
        path.unlink()
        shutil.move(copy, path)


def test_added_files_are_refused_among_the_arrays_and_ignored_beside_them(tmp_path):
    store, entry = make(tmp_path, compress=True)
    manifest = store.read(KEY).manifest
    (arrays,) = entry.glob("arrays-*")
    for folder in (arrays, arrays / "input_ids", arrays / "input_ids" / "c"):
        (folder / "1").write_bytes(b"more")
        assert outcome(store, manifest) == "broken"
        (folder / "1").unlink()
    (entry / "notes.txt").write_text("mine")
    assert outcome(store, manifest) == "harmless"


def test_an_entry_under_another_name_is_found(tmp_path):
    store, entry = make(tmp_path, compress=True)
    other = EntryKey(step=2)
    shutil.copytree(entry, Path(tmp_path, other.name))
    with pytest.raises(BrokenEntryError, match="it belongs to 'train-00000001-0000'"):
        store.read(other)
