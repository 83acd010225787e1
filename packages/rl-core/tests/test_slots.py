"""Slots: reuse of files, detection of torn ones, and no access outside their folder."""

import gc
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import Batch
from rl_core.data.segment import plan_segment
from rl_core.errors import JournalError, SegmentError
from rl_core.queue.shared_memory.slots import SMALLEST_BYTES, SlotPool, SlotRows, capacity_for, map_slot
from rl_core.testing import make_trajectory

LARGE = 20_000


def large_batch(session=0):
    row = make_trajectory("p0", session, num_response_tokens=LARGE)
    row.input_ids[:] = session
    return Batch.from_trajectories([row])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.integers(1, 1 << 48), st.integers(0, 46).map(lambda n: (1 << n) + 1)))
def test_a_slot_is_at_most_a_quarter_too_large(size):
    capacity = capacity_for(size)
    assert size <= capacity
    assert capacity == SMALLEST_BYTES if size <= SMALLEST_BYTES else capacity - size <= size / 4
    assert capacity_for(capacity) == capacity
    assert capacity % 4096 == 0


def test_sizes_are_few():
    assert len({capacity_for(size) for size in range(1 << 20, 1 << 21, 1000)}) <= 5


# -- the pool


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_free_slot_is_used_again(tmp_path):
    pool = SlotPool(tmp_path / "slots")
    first = pool.allocate(100_000, "a")
    inode = (tmp_path / "slots" / first[0]).stat().st_ino
    pool.free(first)
    again = pool.allocate(99_000, "a")
    assert again == first
    assert (tmp_path / "slots" / again[0]).stat().st_ino == inode
    other = pool.allocate(100_000, "a")
    assert other != first
    assert len(files_in(tmp_path / "slots")) == 2
    assert pool.allocate(500_000, "a")[1] == capacity_for(500_000)


def test_a_client_gets_the_slot_that_it_used_last(tmp_path):
    pool = SlotPool(tmp_path)
    slots = {client: pool.allocate(100_000, client) for client in "abc"}
    for client in "abc":
        pool.free(slots[client])
    assert pool.allocate(100_000, "a") == slots["a"]
    assert pool.allocate(100_000, "z") == slots["c"]
    assert pool.allocate(100_000, "a") == slots["b"]


def test_free_slots_beyond_the_bound_are_given_back(tmp_path):
    pool = SlotPool(tmp_path, spare_bytes=2 * capacity_for(100_000))
    slots = [pool.allocate(100_000, "a") for _ in range(4)]
    for slot in slots:
        pool.free(slot)
    assert files_in(tmp_path) == sorted(name for name, _ in slots[:2])
    again = [pool.allocate(100_000, "a") for _ in range(3)]
    assert [slot in slots for slot in again] == [True, True, False]


def test_a_slot_that_is_freed_twice_is_not_given_to_two(tmp_path):
    pool = SlotPool(tmp_path)
    slot = pool.allocate(100_000, "a")
    pool.free(slot)
    pool.free(slot)
    assert pool.allocate(100_000, "a") != pool.allocate(100_000, "a")


def test_slots_of_an_earlier_server_are_never_used_again(tmp_path):
    old = SlotPool(tmp_path)
    kept, left = old.allocate(100_000, "a"), old.allocate(100_000, "a")
    pool = SlotPool(tmp_path)
    assert pool.remove_others([kept, b"inline"]) == 1
    assert files_in(tmp_path) == [kept[0]]
    assert left[0] != kept[0]
    pool.free(kept)
    assert files_in(tmp_path) == []
    assert pool.allocate(100_000, "a") not in (kept, left)


def test_what_travelled_with_its_message_has_no_slot(tmp_path):
    pool = SlotPool(tmp_path)
    for place in (b"inline", None):
        pool.free(place)
    pool.check(b"inline")
    assert files_in(tmp_path) == []


def test_nobody_else_may_look_at_slots(tmp_path):
    pool = SlotPool(tmp_path / "slots")
    name, _ = pool.allocate(1, "a")
    assert stat.S_IMODE((tmp_path / "slots").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "slots" / name).stat().st_mode) == 0o600


FULL_DISK = """
import resource, sys
from pathlib import Path
from rl_core.errors import JournalError
from rl_core.queue.shared_memory.slots import SlotPool

folder = Path(sys.argv[1])
pool = SlotPool(folder)
small = pool.allocate(1 << 16, "a")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    pool.allocate(1 << 24, "a")
except JournalError as error:
    print(error)
print(sorted(path.name for path in folder.iterdir()) == [small[0]])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print((folder / pool.allocate(1 << 24, "a")[0]).stat().st_size)
"""


def test_a_full_disk_says_what_to_do_and_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "slots")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert f"no space for {1 << 24} bytes in {tmp_path / 'slots'}" in said[0]
    assert "Free space, or set capacity_bytes." in said[0]
    assert said[1:] == ["True", str(1 << 24)]


def test_a_folder_that_went_away_is_a_journal_error(tmp_path):
    pool = SlotPool(tmp_path / "slots")
    (tmp_path / "slots").rmdir()
    with pytest.raises(JournalError, match=r"no space for .* No such file or directory"):
        pool.allocate(1, "a")


# -- valid and invalid places


@pytest.fixture
def folder(tmp_path):
    """Make a folder of slots with a link, a folder and a pipe, next to a secret file."""
    (tmp_path / "secret.slot").write_bytes(b"s" * SMALLEST_BYTES)
    folder = tmp_path / "slots"
    folder.mkdir()
    (folder / "link.slot").symlink_to(tmp_path / "secret.slot")
    (folder / "short.slot").write_bytes(b"s" * 100)
    (folder / "folder.slot").mkdir()
    os.mkfifo(folder / "pipe.slot")
    return folder


@pytest.mark.parametrize(
    "place",
    [
        ["../secret.slot", SMALLEST_BYTES],
        ["slots/../../secret.slot", SMALLEST_BYTES],
        ["/etc/passwd", 1],
        ["link.slot", SMALLEST_BYTES],
        ["short.slot", SMALLEST_BYTES],
        ["folder.slot", 1],
        ["pipe.slot", 1],
        ["missing.slot", 1],
        ["", 1],
        [".", 1],
        ["..", 1],
        ["a\0.slot", 1],
        ["short.slot\n", 1],
        ["sh\u00f6rt.slot", 1],
        ["x" * 5000 + ".slot", 1],
        ["short.slot", 0],
        ["short.slot", -1],
        ["short.slot", 1 << 100],
        ["short.slot", "100"],
        ["short.slot", 10.0],
        ["short.slot"],
        ["short.slot", 1, 1],
        [],
        [b"short.slot", 1],
        [["short.slot"], 1],
        {"short.slot": 1},
        "short.slot",
        None,
        7,
    ],
)
def test_places_that_no_server_gives_are_refused(folder, place):
    before = (folder.parent / "secret.slot").read_bytes(), files_in(folder)
    with pytest.raises(SegmentError, match="slot"):
        map_slot(folder, place)
    pool = SlotPool(folder)
    with pytest.raises(SegmentError, match="slot"):
        pool.check(place)
    if isinstance(place, list) and place and place[0] not in files_in(folder):
        pool.free(place)
        assert ((folder.parent / "secret.slot").read_bytes(), files_in(folder)) == before


def test_a_torn_slot_is_found(tmp_path):
    pool = SlotPool(tmp_path)
    rows = SlotRows(tmp_path, lambda number: None)
    prepared = rows.prepare(large_batch())
    place = pool.allocate(prepared.size_bytes, "a")
    with pytest.raises(SegmentError, match="expected a segment of format 1"):
        pool.check(place)
    rows.write(prepared, place)
    pool.check(place)
    path = tmp_path / place[0]
    os.truncate(path, place[1] - 1)
    with pytest.raises(SegmentError, match=f"must have {place[1]} bytes; found {place[1] - 1}"):
        pool.check(place)
    path.unlink()
    with pytest.raises(SegmentError, match="cannot be opened: No such file"):
        pool.check(place)


# -- a client's rows


class Client:
    """The rows of one client, and the numbers of the segments that it has unpinned."""

    def __init__(self, folder):
        self.unpinned = []
        self.pool = SlotPool(folder)
        self.rows = SlotRows(folder, self.unpinned.append)

    def put(self, batch):
        prepared = self.rows.prepare(batch)
        place = self.pool.allocate(prepared.size_bytes, "a")
        assert self.rows.write(prepared, place) is None
        return place


def test_small_rows_travel_with_their_message_and_large_ones_do_not(tmp_path):
    rows = SlotRows(tmp_path, lambda number: None)
    small, large = Batch.from_trajectories([make_trajectory("p0", 0)]), large_batch()
    assert rows.prepare(small).place == plan_segment(small).as_bytes()
    assert rows.prepare(large).place is None
    assert rows.read(1, rows.prepare(small).place).keys == small.keys


def test_rows_are_views_of_their_slot_and_are_unpinned_with_the_last(tmp_path):
    client = Client(tmp_path)
    place = client.put(large_batch(5))
    batch = client.rows.read(7, place)
    row = batch.ragged("input_ids")[0]
    assert row.tolist() == [5] * (LARGE + 2)
    assert not row.flags.writeable
    assert np.shares_memory(row, client.rows._mapped(place))
    again = client.rows.read(7, place)
    assert client.unpinned == [7], "the second look stands on the first one's pin"
    assert np.shares_memory(again.ragged("input_ids").values, row)
    del batch, again
    gc.collect()
    assert client.unpinned == [7]
    del row
    gc.collect()
    assert client.unpinned == [7, 7]


def test_torn_rows_are_refused_and_unpinned(tmp_path):
    client = Client(tmp_path)
    place = client.put(large_batch())
    with (tmp_path / place[0]).open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff")
    with pytest.raises(SegmentError, match="wrong checksum"):
        client.rows.read(3, place)
    with pytest.raises(SegmentError, match="cannot be opened"):
        client.rows.read(4, ["gone.slot", 1])
    assert client.unpinned == [3, 4]


def test_a_slot_that_is_used_again_has_the_new_rows(tmp_path):
    client = Client(tmp_path)
    for number in range(5):
        place = client.put(large_batch(number))
        batch = client.rows.read(number, place)
        assert set(batch.ragged("input_ids")[0].tolist()) == {number}
        del batch
        gc.collect()
        assert client.unpinned[-1] == number
        client.pool.free(place)
    assert len(files_in(tmp_path)) == 1


def test_threads_may_read_and_write_at_once(tmp_path):
    client = Client(tmp_path)
    places = [client.put(large_batch(number)) for number in range(4)]
    wrong = []

    def read(offset):
        for turn in range(20):
            number = (turn + offset) % 4
            batch = client.rows.read(number, places[number])
            if set(batch.ragged("input_ids")[0].tolist()) != {number}:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert wrong == []
    assert sorted(client.unpinned) == sorted([*range(4)] * 20)
