"""Torn segments of a queue on disk: detection, reports and reissue."""

import os
import sqlite3

import msgspec
import pytest
from queue_directory import LATE, REFERENCE, crashed, open_queues, put, ready, uids_of

from rl_core.errors import DeadlineError
from rl_core.queue.journal.database import DATABASE, SEGMENTS
from rl_core.testing import ragged_like


@pytest.fixture
def opened():
    with open_queues() as opened:
        yield opened


def slots_of(queue):
    """Return the names of the slots of each prompt's segments."""
    core = queue._service.core
    return {group.uid: [core.segments.place(number)[0] for number in group.segments()] for group in core.groups}


def overwrite_header(path):
    with path.open("r+b") as file:
        file.write(b"\xff" * 16)


@pytest.mark.parametrize(
    ("tear", "word"),
    [
        (lambda path: os.truncate(path, 1000), "found 1000"),
        (overwrite_header, "format"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "format"),
    ],
)
def test_prompts_of_a_torn_segment_are_issued_again_and_others_are_untouched(tmp_path, opened, tear, word):
    queue = ready(opened(tmp_path / "q"), num_prompts=3, num_sessions=2, large=True)
    slots = slots_of(queue)
    copy = crashed(tmp_path / "q")
    tear(copy / SEGMENTS / slots["p1"][1])
    again = opened(copy)
    (lost,) = again.recovery().lost_segments
    assert "of prompts p1" in lost
    assert word in lost
    assert [(u.prompt.uid, u.sessions, u.attempt) for u in again.unsettled()] == [("p1", (0, 1), 2)]
    assert [entry.state for entry in again.ledger()] == ["settled", "issued", "settled"]
    assert again.ledger()[1].reason.startswith("lost: ")
    assert again.stats()["drops/lost"] == 1
    assert uids_of(again.lease("train", groups=2, deadline_s=0)) == ["p0", "p2"]
    kept = {name for uid in ("p0", "p2") for name in slots[uid]}
    assert {path.name for path in (copy / SEGMENTS).iterdir()} == kept
    for session in range(2):
        put(again, "p1", session, large=True)
    assert len(again.lease("train", groups=1, deadline_s=0).batch) == 2
    again.close()
    assert opened(copy).recovery().lost_segments == ()


def test_a_group_whose_segments_are_all_torn_is_issued_again_once(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_sessions=3, large=True)
    names = slots_of(queue)["p0"]
    copy = crashed(tmp_path / "q")
    for name in names:
        (copy / SEGMENTS / name).unlink()
    again = opened(copy)
    assert len(again.recovery().lost_segments) == 1
    assert (again.ledger()[0].attempt, again.stats()["drops/lost"]) == (2, 1)


def test_columns_that_were_torn_are_given_again(tmp_path, opened):
    queue = ready(opened(tmp_path / "q", REFERENCE, LATE), num_prompts=2, large=True)
    before = {name for names in slots_of(queue).values() for name in names}
    lease = queue.lease("reference", groups=2, deadline_s=0)
    queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
    del lease
    (late,) = {name for names in slots_of(queue).values() for name in names} - before
    copy = crashed(tmp_path / "q")
    (copy / SEGMENTS / late).unlink()
    again = opened(copy, REFERENCE, LATE)
    assert len(again.recovery().lost_segments) == 1
    assert [(entry.state, entry.acked_by) for entry in again.ledger()] == [("settled", frozenset())] * 2
    assert again.unsettled() == []
    assert uids_of(again.lease("reference", groups=2, deadline_s=0)) == ["p0", "p1"]
    with pytest.raises(DeadlineError, match="lack columns"):
        again.lease("train", groups=1, deadline_s=0)


def test_altered_rows_are_found_when_they_are_leased_and_never_delivered(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=3, large=True)
    copy = crashed(tmp_path / "q")
    path = copy / SEGMENTS / slots_of(queue)["p1"][0]
    with path.open("r+b") as file:
        file.seek(3000)
        file.write(b"\xff\xfe\xfd")
    again = opened(copy)
    assert again.recovery().lost_segments == ()
    with pytest.raises(DeadlineError, match=r"lease of 3 groups .* waited: 2 ready"):
        again.lease("train", groups=3, deadline_s=0)
    assert again.ledger()[1].reason.startswith("lost: ")
    assert again.stats()["drops/lost"] == 1
    assert uids_of(again.lease("train", groups=2, deadline_s=0)) == ["p0", "p2"]
    assert [u.prompt.uid for u in again.unsettled()] == ["p1"]
    put(again, "p1", large=True)
    assert uids_of(again.lease("train", groups=1, deadline_s=0)) == ["p1"]


def test_altered_rows_that_lie_in_the_journal_are_found_too(tmp_path, opened):
    queue = ready(opened(tmp_path), num_prompts=2)
    queue.close()
    connection = sqlite3.connect(tmp_path / DATABASE)
    number, place = connection.execute("SELECT number, place FROM segments ORDER BY number").fetchone()
    altered = bytearray(place)
    altered[-40] ^= 1
    segment = bytearray(msgspec.msgpack.decode(place))
    segment[len(segment) - 64] ^= 1
    connection.execute(
        "UPDATE segments SET place = ? WHERE number = ?", (msgspec.msgpack.encode(bytes(segment)), number)
    )
    connection.commit()
    connection.close()
    again = opened(tmp_path)
    with pytest.raises(DeadlineError, match=r"lease of 2 groups .* waited: 1 ready"):
        again.lease("train", groups=2, deadline_s=0)
    assert again.stats()["drops/lost"] == 1
    assert uids_of(again.lease("train", groups=1, deadline_s=0)) == ["p1"]


@pytest.mark.parametrize("place", [["../secret.slot", 65536], ["/etc/passwd", 1], ["x"], 7, None, {"a": 1}, "text"])
def test_places_that_no_queue_writes_lead_nowhere(tmp_path, opened, place):
    secret = tmp_path / "q" / "secret.slot"
    ready(opened(tmp_path / "q"), num_prompts=2, large=True).close()
    secret.write_bytes(b"s" * 65536)
    connection = sqlite3.connect(tmp_path / "q" / DATABASE)
    number = connection.execute("SELECT min(number) FROM segments").fetchone()[0]
    connection.execute("UPDATE segments SET place = ? WHERE number = ?", (msgspec.msgpack.encode(place), number))
    connection.commit()
    connection.close()
    again = opened(tmp_path / "q")
    assert len(again.recovery().lost_segments) == 1
    assert [entry.state for entry in again.ledger()] == ["issued", "settled"]
    assert secret.read_bytes() == b"s" * 65536


def test_slots_that_nothing_refers_to_are_removed(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=2, large=True)
    copy = crashed(tmp_path / "q")
    (copy / SEGMENTS / "0000-1-65536.slot").write_bytes(b"x" * 65536)
    again = opened(copy)
    assert again.recovery().removed_slots == 1
    assert len(list((copy / SEGMENTS).iterdir())) == 2
    assert queue.recovery().removed_slots == 0
