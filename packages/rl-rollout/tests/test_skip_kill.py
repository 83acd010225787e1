"""Killed writers leave the old entry, the new one or none, and later runs remove the leftovers."""

import random
import signal
import sys
import time

import pytest
from skip_processes import DEADLINE_S, Workers
from skip_worker import KEY, read, write

from rl_core.testing import wait_until
from rl_rollout.skip import EntryKey, EntryStore, SkipCache, SkipOptions

LIVE = EntryKey(step=99)
MAX_DELAY_S = 0.15
SHORT_KILLS, LONG_KILLS = 6, 200


@pytest.fixture
def workers(tmp_path):
    folder = tmp_path / "workers"
    folder.mkdir()
    found = Workers(folder)
    yield found
    found.close()


def leftovers(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def sweep(root):
    """Remove leftovers, as every run does when it starts."""
    SkipCache(SkipOptions(enabled=True, directory=str(root)))


def last_start(worker):
    return max((int(line.split()[1]) for line in worker.lines if line.startswith("start")), default=0)


def kill_writers(workers, tmp_path, *, seed, kills):
    """Kill writers repeatedly; return how often an old entry, a new one or none was found, and leftovers."""
    draws = random.Random(seed)
    seen = dict.fromkeys(("old", "new", "none", "left"), 0)
    for number in range(kills):
        root = tmp_path / f"cache{number}"
        role = draws.choice(["replace_for_ever", "add_for_ever"])
        store = EntryStore(str(root), compress=draws.random() < 0.5)
        worker = workers.start(role, root, compress=draws.random() < 0.5)
        worker.wait_for("ready")
        delay_s = draws.uniform(0, MAX_DELAY_S)
        time.sleep(delay_s)  # kill at a random point
        worker.kill()
        started = last_start(worker)
        if role == "add_for_ever":
            assert store.entries() == [EntryKey(step=step) for step in range(1, len(store.entries()) + 1)]
            assert [read(store, key) for key in store.entries()[: started - 1]] == list(range(1, started))
            found = read(store, EntryKey(step=max(started, 1)))
            seen["none" if found is None else "new"] += 1
            assert found in (None, started)
        else:
            found = read(store, KEY)
            seen["none" if found is None else "new" if found == started else "old"] += 1
            assert found in (None, started - 1, started)
        seen["left"] += bool(root.exists() and leftovers(root))
        with store.folder._new_file(LIVE.name):
            sweep(root)
            assert [name.startswith(f".writing-{LIVE.name}") for name in leftovers(root)] == [True], leftovers(root)
        assert leftovers(root) == []
        assert write(store, KEY, 1000, replace=True)
        assert read(store, KEY) == 1000
    return seen


def test_a_writer_killed_at_any_point_leaves_the_old_entry_the_new_one_or_none(workers, tmp_path, seed):
    seen = kill_writers(workers, tmp_path, seed=seed, kills=SHORT_KILLS)
    assert seen["left"] > 0, "no writer was killed in the middle of a store"


@pytest.mark.parametrize("old", [1, None])
def test_a_writer_killed_before_each_operation_on_files_leaves_a_whole_entry_or_none(workers, tmp_path, old):
    seen = []
    for operation in range(1, 100):
        root = tmp_path / f"cache{operation}"
        store = EntryStore(str(root))
        store.folder.prepare()
        if old is not None:
            write(store, KEY, old, replace=False)
        worker = workers.start("killed_before", root, operation=operation, replace=old is not None)
        is_killed = worker.wait() == -signal.SIGKILL
        seen.append(read(store, KEY))
        sweep(root)
        assert leftovers(root) == []
        assert read(store, KEY) == seen[-1]
        if not is_killed:
            break
    changes = seen.index(2)
    assert seen == [old] * changes + [2] * (len(seen) - changes)
    assert len(seen) > 15, "each array, the flush and the link are operations"


@pytest.mark.soak
def test_skip_cache_writers_killed_200_times(workers, tmp_path, seed, capsys):
    seen = kill_writers(workers, tmp_path, seed=seed, kills=LONG_KILLS)
    with capsys.disabled():
        sys.stdout.write(f"\n{LONG_KILLS} kills, seed {seed}: {seen}\n")
    assert min(seen.values()) > 0, seen


def test_a_writer_that_lives_is_not_swept_however_slow_it_is(workers, tmp_path):
    root = tmp_path / "cache"
    worker = workers.start("add_for_ever", root)

    def is_stopped_within_a_store():
        worker.send(signal.SIGSTOP)
        # A writer stopped before it holds its lock may lose its file, and makes another.
        if root.exists() and leftovers(root) and not EntryStore(str(root)).folder.leftovers():
            return True
        worker.send(signal.SIGCONT)
        return False

    wait_until(is_stopped_within_a_store, "a store to be under way", deadline_s=DEADLINE_S)
    before = leftovers(root)
    sweep(root)
    assert leftovers(root) == before
    number = last_start(worker)
    worker.send(signal.SIGCONT)
    worker.wait_for(f"start {number + 1}")
    worker.kill()
    assert read(EntryStore(str(root)), EntryKey(step=number)) == number
