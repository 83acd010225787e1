"""Queues on disk: reopening them unchanged, and directories that cannot be opened."""

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from queue_directory import LARGE, LATE, REFERENCE, TRAIN, crashed, entries, open_queues, put, ready, uids_of

from rl_core import InProcessQueue, QueueOptions
from rl_core.data.records import Prompt
from rl_core.errors import DataError, JournalError, OutdatedLeaseError
from rl_core.queue.core import QueueCore
from rl_core.queue.group import MAX_SESSIONS
from rl_core.queue.journal.database import DATABASE, SEGMENTS, SqliteJournal
from rl_core.queue.messages import Done, Finish, Refused, as_retry
from rl_core.testing import FakeClock, make_prompt, make_prompts, ragged_like


@pytest.fixture
def opened():
    with open_queues() as opened:
        yield opened


# -- reopening


def test_a_queue_that_crashed_is_opened_as_it_was(tmp_path, opened):
    queue = opened(tmp_path / "q", REFERENCE, LATE)
    queue.set_policy_version(3)
    queue.issue(make_prompts(7), num_sessions=2)
    for index in range(4):
        for session in range(2):
            put(queue, f"p{index}", session, large=index % 2 == 0)
    reference = queue.lease("reference", groups=3, deadline_s=0)
    given = ragged_like(reference.batch, "reference_logprobs", [float(-i) for i in range(6)])
    queue.ack(reference, {"reference_logprobs": given})
    queue.ack(queue.lease("train", groups=1, deadline_s=0))
    queue.lease("train", groups=1, deadline_s=0)
    queue.claim(prompts=1, deadline_s=0)
    put(queue, "p4", 1)
    queue.fail("p5", 0, reason="engine aborted")
    queue.drop("p6", reason="too easy")
    queue.drop("p3", reason="sandbox broke", reissue=True)
    before = entries(queue)
    counted = {name: value for name, value in queue.stats().items() if name.startswith(("rows", "groups", "drops"))}

    again = opened(crashed(tmp_path / "q"), REFERENCE, LATE)
    assert entries(again) == before
    assert [entry["state"] for entry in before] == ["done", "settled", "settled", *["issued"] * 3, "dropped"]
    assert [(u.prompt.uid, u.sessions, u.attempt, u.is_claimed) for u in again.unsettled()] == [
        ("p3", (0, 1), 2, False),
        ("p4", (0,), 1, False),
        ("p5", (1,), 1, False),
    ]
    found = {name: again.stats()[name] for name in counted if name != "rows/leased"}
    assert found == {name: value for name, value in counted.items() if name != "rows/leased"}
    assert (again.stats()["leases"], again.stats()["claims"]) == (0, 0)
    lease = again.lease("train", groups=2, deadline_s=0)
    assert uids_of(lease) == ["p1", "p2"], "what was leased comes back"
    assert [float(row[0]) for row in lease.batch.ragged("reference_logprobs")] == [-2.0, -3.0, -4.0, -5.0]
    assert lease.batch.ragged("input_ids").lengths.tolist() == [5, 5, LARGE + 2, LARGE + 2]
    recovery = again.recovery()
    assert recovery.prompts == {"done": 1, "settled": 2, "issued": 3, "dropped": 1}
    assert (recovery.num_acks, recovery.num_unsettled, recovery.lost_segments) == (4, 3, ())


def test_a_queue_that_was_closed_is_opened_as_it_was(tmp_path, opened):
    queue = ready(opened(tmp_path), num_prompts=3, large=True)
    queue.ack(queue.lease("train", groups=1, deadline_s=0))
    before = entries(queue)
    for _ in range(3):
        queue.close()
        queue = opened(tmp_path)
        assert entries(queue) == before
        assert queue.recovery().lost_segments == ()
    assert uids_of(queue.lease("train", groups=2, deadline_s=0)) == ["p1", "p2"]


def test_numbers_of_leases_and_segments_never_come_back(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=2, large=True)
    old = queue.lease("train", groups=1, deadline_s=0)
    segments = set(queue._service.core.segments)
    queue.ack(queue.lease("train", groups=1, deadline_s=0))
    copy = crashed(tmp_path / "q")
    again = opened(copy)
    new = again.lease("train", groups=1, deadline_s=0)
    assert new.lease_id != old.lease_id
    with pytest.raises(OutdatedLeaseError):
        again.ack(old)
    again.ack(new)
    again.issue([make_prompt("p9")], num_sessions=1)
    put(again, "p9", large=True)
    assert len(set(again._service.core.segments) - segments) == 1
    assert max(again._service.core.segments) > max(segments)


def test_the_policy_version_and_counts_are_kept(tmp_path, opened):
    queue = opened(tmp_path / "q")
    queue.set_policy_version(7)
    assert opened(crashed(tmp_path / "q"))._service.core.policy_version == 7
    ready(queue, num_prompts=2)
    queue.drop("p0", reason="too easy", reissue=True)
    again = opened(crashed(tmp_path / "q"))
    assert (again.stats()["drops/too easy"], again.stats()["reissued"]) == (1, 1)
    assert again._service.core.policy_version == 7


def test_prompts_keep_everything_that_they_have(tmp_path, opened):
    queue = opened(tmp_path / "q")
    prompt = Prompt(
        uid="é/1",
        input_ids=make_prompt("x").input_ids,
        messages=({"role": "user", "content": "2 + 2"},),
        data_source="math",
        ground_truth={"answer": [4, None, True]},
        columns={"level": 1.5},
    )
    queue.issue([prompt], num_sessions=1)
    found = opened(crashed(tmp_path / "q")).claim(prompts=1, deadline_s=0).prompts[0]
    for field in ("uid", "messages", "data_source", "ground_truth", "columns"):
        assert getattr(found, field) == getattr(prompt, field)
    assert found.input_ids.tolist() == [1, 2]


def test_a_prompt_that_is_not_json_is_refused_and_the_queue_goes_on(tmp_path, opened):
    queue = opened(tmp_path)
    odd = Prompt(uid="odd", input_ids=make_prompt("x").input_ids, columns={"f": object()})
    with pytest.raises(DataError, match="prompt 'odd', apart from its tokens, must consist of JSON values"):
        queue.issue([make_prompt("p0"), odd], num_sessions=1)
    assert queue.ledger() == []
    queue.issue([make_prompt("p0")], num_sessions=1)
    put(queue, "p0")
    assert len(queue.ledger()) == 1


def test_a_forgotten_uid_may_be_issued_again_at_once(tmp_path):
    journal = SqliteJournal(tmp_path, [TRAIN], QueueOptions(), clock=FakeClock())
    core = QueueCore([TRAIN], QueueOptions())
    core.issue([("p0", make_prompt("p0"))], num_sessions=1, now=0.0)
    journal.write(core)
    core.dirty.clear()
    core.drop(core.groups.find_open("p0"), "too easy", reissue=False, now=0.0)
    core.forget_finished()
    core.issue([("p0", make_prompt("p0"))], num_sessions=2, now=0.0)
    journal.write(core)  # a server may receive all these calls between two writes
    (group,) = journal.load({}).groups
    assert (group.uid, group.num_sessions, group.state) == ("p0", 2, "issued")
    journal.close()


def test_what_is_forgotten_stays_forgotten(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=2, large=True)
    queue.ack(queue.lease("train", groups=2, deadline_s=0))
    assert queue.forget_finished() == 2
    again = opened(crashed(tmp_path / "q"))
    assert again.ledger() == []
    assert list((tmp_path / "q-crashed" / SEGMENTS).iterdir()) == []
    again.issue(make_prompts(1), num_sessions=1)


def test_times_go_on_over_a_restart(tmp_path):
    clock = FakeClock(50.0)
    options = QueueOptions(directory=tmp_path)
    queue = InProcessQueue([TRAIN], options=options, clock=clock)
    queue.issue(make_prompts(1), num_sessions=1)
    clock.advance(5)
    assert queue.unsettled()[0].age_s == pytest.approx(5)
    queue.drop("p0", reason="again", reissue=True)
    queue.close()
    other = FakeClock(9000.0)
    queue = InProcessQueue([TRAIN], options=options, clock=other)
    other.advance(3)
    assert queue.unsettled()[0].age_s == pytest.approx(3, abs=1.0)
    queue.close()


# -- directories that cannot be opened


def test_the_directory_of_other_tasks_is_refused(tmp_path, opened):
    opened(tmp_path, REFERENCE, LATE).close()
    with pytest.raises(JournalError, match=r"queue of tasks \['reference.*'train'\]; found \['train'\].*Open it with"):
        opened(tmp_path)
    opened(tmp_path, LATE, REFERENCE)


OPEN = """
import sys
from pathlib import Path
from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.errors import JournalError

try:
    InProcessQueue([TaskSpec(name="train", needs=frozenset())], options=QueueOptions(directory=Path(sys.argv[1])))
except JournalError as error:
    print(error)
"""


def test_a_directory_is_opened_once_at_a_time(tmp_path, opened):
    queue = opened(tmp_path)
    with pytest.raises(JournalError, match="is open in another process"):
        opened(tmp_path)
    said = subprocess.run([sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert f"{tmp_path} is open in another process; connect to that queue, or close it first." in said.stdout
    queue.close()
    opened(tmp_path)


def is_link_to(link, path):
    """Return whether a link, such as a descriptor in /proc, leads to a path."""
    with contextlib.suppress(OSError):  # closed since it was listed
        return link.readlink() == path
    return False


def test_a_queue_that_is_closed_twice_closes_no_file_of_others(tmp_path, opened):
    queue = opened(tmp_path / "q")
    (lock,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if is_link_to(link, tmp_path / "q" / "lock"))
    queue.close()
    descriptors = [os.open(tmp_path, os.O_RDONLY) for _ in range(20)]
    assert lock in descriptors
    queue.close()
    for descriptor in descriptors:
        os.close(descriptor)


def test_another_format_is_refused(tmp_path, opened):
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (b"2",))
    connection.close()
    with pytest.raises(JournalError, match="has format 2; expected 4"):
        opened(tmp_path)


@pytest.mark.parametrize("made", ["file", "lock folder", "lock link", "database folder", "segments file", "log folder"])
def test_a_directory_that_cannot_be_used_is_a_journal_error(tmp_path, opened, made):
    directory = tmp_path / "q"
    if made == "file":
        directory.write_text("no directory")
    else:
        directory.mkdir()
    if made == "lock folder":
        (directory / "lock").mkdir()
    if made == "lock link":
        (directory / "lock").symlink_to(tmp_path / "elsewhere")
    if made == "database folder":
        (directory / DATABASE).mkdir()
    if made == "log folder":
        (directory / f"{DATABASE}-wal").mkdir()
    if made == "segments file":
        (directory / SEGMENTS).write_text("no directory")
    with pytest.raises(JournalError, match=rf"{directory}.* cannot be used"):
        opened(directory)
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_was_refused_opens_once_it_is_mended(tmp_path, opened):
    (tmp_path / SEGMENTS).write_text("no directory")
    with pytest.raises(JournalError, match=f"{SEGMENTS} cannot be used for slots"):
        opened(tmp_path)
    (tmp_path / SEGMENTS).unlink()
    assert opened(tmp_path).ledger() == []


DAMAGED = [
    "UPDATE meta SET value = x'ff' WHERE key = 'format'",
    "UPDATE meta SET value = 'many' WHERE key = 'epoch'",
    "UPDATE meta SET value = '{' WHERE key = 'tasks'",
    "UPDATE meta SET value = '[1]' WHERE key = 'tasks'",
    "UPDATE meta SET value = '[]' WHERE key = 'counts'",
    "UPDATE groups SET record = '{}'",
    "UPDATE groups SET record = 7",
    "UPDATE groups SET state = 'asleep'",
    "UPDATE groups SET uid = 'p8' WHERE uid = 'p0'",
    "UPDATE groups SET prompt = CAST(replace(prompt, '\"p0\"', '\"p8\"') AS BLOB) WHERE uid = 'p0'",
    "UPDATE groups SET prompt = x'00'",
    "UPDATE groups SET record = replace(record, '\"parts\":[[', '\"parts\":[[1,')",
    "UPDATE segments SET place = x'c1'",
    "UPDATE segments SET number = number + 1",
    "DELETE FROM segments",
    "UPDATE groups SET number = number + 1",
    "UPDATE groups SET record = CAST(replace(record, '\"num_sessions\":1', '\"num_sessions\":3') AS BLOB)",
    "UPDATE meta SET value = CAST(replace(value, '\"policy_version\":0', '\"policy_version\":4') AS BLOB)",
]


@pytest.mark.parametrize("change", DAMAGED)
def test_rows_that_were_altered_are_a_journal_error(tmp_path, opened, change):
    ready(opened(tmp_path), large=True).close()
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.executescript(change)
    connection.close()
    with pytest.raises(JournalError, match=r"journal|record"):
        opened(tmp_path)


def reopened(opened, directory, content):
    """Open a queue on a database with this content; return None if it is refused."""
    directory.mkdir()
    (directory / DATABASE).write_bytes(content)
    try:
        return opened(directory)
    except JournalError:
        return None


def test_a_damaged_database_is_a_journal_error_or_what_sqlite_still_reads(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=30)
    queue.close()
    rng = random.Random(0)
    content = (tmp_path / "q" / DATABASE).read_bytes()
    refused = 0
    for turn in range(60):
        altered = bytearray(content)
        if turn % 3 == 0:
            altered = altered[: rng.randrange(len(altered))]
        else:
            for _ in range(rng.choice([1, 30, 3000])):
                altered[rng.randrange(len(altered))] = rng.randrange(256)
        again = reopened(opened, tmp_path / f"d{turn}", altered)
        if again is None:
            refused += 1
            continue
        assert len(again.ledger()) <= 30
        assert again.stats()["rows"] <= 30
        again.close()
    assert refused > 20


def test_a_flipped_bit_is_found_or_harmless(tmp_path, opened, seed):
    queue = ready(opened(tmp_path / "q"), num_prompts=30)
    before = entries(queue)
    queue.close()
    rng = random.Random(seed)
    content = (tmp_path / "q" / DATABASE).read_bytes()
    used = [place for place, byte in enumerate(content) if byte]
    refused = 0
    for turn in range(300):
        flipped = bytearray(content)
        flipped[rng.choice(used)] ^= 1 << rng.randrange(8)
        again = reopened(opened, tmp_path / f"d{turn}", flipped)
        if again is None:
            refused += 1
            continue
        assert entries(again) == before, f"seed {seed}, turn {turn}"
        again.close()
    assert refused > 100


def test_a_page_that_is_used_twice_is_refused(tmp_path, opened):
    ready(opened(tmp_path)).close()
    content = bytearray((tmp_path / DATABASE).read_bytes())
    page = int.from_bytes(content[16:18], "big")
    content[2 * page : 3 * page] = content[page : 2 * page]
    (tmp_path / DATABASE).write_bytes(bytes(content))
    with pytest.raises(JournalError, match="malformed"):
        opened(tmp_path)


def test_more_sessions_than_a_prompt_may_have_are_refused_when_they_are_issued(tmp_path, opened):
    queue = opened(tmp_path)
    with pytest.raises(DataError, match="num_sessions must be from 1 to 4096"):
        queue.issue(make_prompts(1), num_sessions=MAX_SESSIONS + 1)
    queue.issue(make_prompts(1), num_sessions=MAX_SESSIONS)
    queue.close()
    opened(tmp_path)


def test_a_torn_log_is_cut(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=2)
    whole = entries(queue)
    queue.drop("p0", reason="too easy")
    copy = crashed(tmp_path / "q")
    log = copy / f"{DATABASE}-wal"
    os.truncate(log, log.stat().st_size - 100)
    (copy / f"{DATABASE}-shm").unlink()
    again = opened(copy)
    assert entries(again) == whole


# -- acks by name


def test_what_was_finished_stays_so(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=3, large=True)
    queue.release(queue.lease("train", prompts=["p2", "p0"], deadline_s=0))
    queue.finish("train", ["p2"])
    before = entries(queue)
    again = opened(crashed(tmp_path / "q"))
    assert entries(again) == before
    assert [entry["state"] for entry in before] == ["settled", "settled", "done"]
    assert (again.recovery().num_acks, again.stats()["acks/train"]) == (1, 1)
    with pytest.raises(DataError, match="already acked by task 'train': 'p2'"):
        again.finish("train", ["p0", "p2"])
    assert uids_of(again.lease("train", prompts=["p0"], deadline_s=0)) == ["p0"]


def test_a_finish_whose_answer_was_lost_counts_once(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=3)
    request = Finish("train", ["p0", "p1"], -5)
    assert isinstance(queue._send(request, deadline_s=1.0), Done)
    again = opened(crashed(tmp_path / "q"))
    for asked in (queue, again):
        assert isinstance(asked._send(as_retry(request), deadline_s=1.0), Done)
        assert asked.stats()["acks/train"] == 2
        assert [entry.state for entry in asked.ledger()] == ["done", "done", "settled"]
        assert "already acked by task 'train'" in asked._send(request, deadline_s=1.0).text
        assert isinstance(asked._send(as_retry(Finish("train", ["p1", "p2"], -6)), deadline_s=1.0), Refused)
    queue.forget_finished()
    assert isinstance(queue._send(as_retry(request), deadline_s=1.0), Done)


def test_a_finish_that_was_lost_on_its_way_is_done_when_it_is_repeated(tmp_path, opened):
    queue = ready(opened(tmp_path / "q"), num_prompts=1)
    assert isinstance(queue._send(as_retry(Finish("train", ["p0"], -5)), deadline_s=1.0), Done)
    assert queue.ledger()[0].state == "done"
