"""Several processes that write one entry or folder: one wins, and readers see only complete entries."""

import json
import sys

import pytest
from skip_processes import DEADLINE_S, Workers
from skip_worker import KEY, groups_of, read, write

from rl_core.testing import wait_until
from rl_rollout.skip import EntryKey, EntryStore

SHORT_ROUNDS, LONG_ROUNDS = 12, 200


@pytest.fixture
def workers(tmp_path):
    folder = tmp_path / "workers"
    folder.mkdir()
    found = Workers(folder)
    yield found
    found.close()


def race(workers, root, *, rounds, replaces, stop):
    """Run two writers and two readers on the same entries; return which writers won each round, and the reads."""
    meet = root.parent / "meet"
    meet.mkdir()
    readers = [workers.start("read_until", root, stop=str(stop)) for _ in range(2)]
    writers = [
        workers.start("race", root, number=number, rival=3 - number, replace=replace, rounds=rounds, meet=str(meet))
        for number, replace in enumerate(replaces, start=1)
    ]
    said = [dict(line.split() for line in writer.result()) for writer in writers]
    stop.touch()
    found = [json.loads(reader.result()[0].removeprefix("found ")) for reader in readers]
    return [[each[str(step)] == "won" for each in said] for step in range(1, rounds + 1)], found


def check_race(workers, tmp_path, *, rounds, replaces):
    root = tmp_path / "cache"
    won, found = race(workers, root, rounds=rounds, replaces=replaces, stop=tmp_path / "stop")
    store = EntryStore(str(root))
    final = [read(store, EntryKey(step=step)) for step in range(1, rounds + 1)]
    for each, number in zip(won, final, strict=True):
        if replaces == (False, False):
            assert sum(each) == 1
            assert number == each.index(True) + 1
        elif replaces == (True, False):
            assert each[0]
            assert number == 1
        else:
            assert all(each)
            assert number in (1, 2)
    assert set().union(*found) <= {"1", "2", "None"}
    assert sum(each.get("1", 0) + each.get("2", 0) for each in found) > 0
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    return final


MODES = pytest.mark.parametrize(
    "replaces", [(False, False), (True, False), (True, True)], ids=["keep", "both", "replace"]
)


@MODES
def test_of_two_writers_one_wins_whole(workers, tmp_path, replaces):
    check_race(workers, tmp_path, rounds=SHORT_ROUNDS, replaces=replaces)


@MODES
@pytest.mark.soak
def test_skip_cache_of_two_writers_one_wins_whole(workers, tmp_path, replaces, capsys):
    final = check_race(workers, tmp_path, rounds=LONG_ROUNDS, replaces=replaces)
    with capsys.disabled():
        sys.stdout.write(f"\n{LONG_ROUNDS} races, replace={replaces}: {final.count(1)} and {final.count(2)} stayed\n")
    if replaces != (True, False):
        assert set(final) == {1, 2}, "one of them was always first: they never raced"


def is_enough(seen, reads):
    return len(seen) >= reads and len(set(seen) - {None}) > 2


def check_replaced_while_read(workers, tmp_path, *, reads):
    root, stop = tmp_path / "cache", tmp_path / "stop"
    write(EntryStore(str(root)), KEY, 0, replace=False)
    writer = workers.start("replace_for_ever", root)
    reader = workers.start("read_until", root, stop=str(stop), step=1)
    store = EntryStore(str(root))
    seen = []
    wait_until(lambda: seen.append(read(store, KEY)) or is_enough(seen, reads), "replacements", deadline_s=DEADLINE_S)
    stop.touch()
    found = json.loads(reader.result()[0].removeprefix("found "))
    writer.kill()
    stored = [number for number in seen if number is not None]
    assert stored == sorted(stored), "an older entry came back"
    assert found.keys() - {"None"}


def test_an_entry_that_is_replaced_all_the_while_is_read_whole_or_not_at_all(workers, tmp_path):
    check_replaced_while_read(workers, tmp_path, reads=60)


@pytest.mark.soak
def test_skip_cache_entry_that_is_replaced_all_the_while_is_read_whole_or_not_at_all(workers, tmp_path):
    check_replaced_while_read(workers, tmp_path, reads=1000)


def check_pruned_while_read(workers, tmp_path, *, reads):
    root, stop = tmp_path / "cache", tmp_path / "stop"
    store = EntryStore(str(root))
    room = 3 * (store.write(KEY, groups_of(1), fingerprint={"number": 1}, generate_s=1.0) + 4096)
    others = [
        workers.start("keep_pruning", root, stop=str(stop), max_bytes=room, first=first) for first in (100_000, 100_001)
    ]
    reader = workers.start("read_until", root, stop=str(stop))
    seen = set()

    def read_all():
        seen.update(number for key in store.entries() if (number := read(store, key)) is not None)
        return len(seen) > 1

    for _ in range(reads):
        read_all()
    wait_until(read_all, "an entry of the others, which may take long to start", deadline_s=DEADLINE_S)
    stop.touch()
    reader.result()
    for other in others:
        other.result()
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= room
    assert [path.name for path in root.iterdir() if path.name.startswith((".", "broken"))] == []


def test_entries_are_removed_by_two_others_while_they_are_read(workers, tmp_path):
    check_pruned_while_read(workers, tmp_path, reads=30)


@pytest.mark.soak
def test_skip_cache_entries_are_removed_by_two_others_while_they_are_read(workers, tmp_path):
    check_pruned_while_read(workers, tmp_path, reads=1000)
