"""Full disks, journals that cannot be written, and the release of unused reservations."""

import json
import subprocess
import sys

import pytest
from queue_directory import LARGE, REFERENCE, TRAIN, entries, open_queues, put, ready

from rl_core import InProcessQueue, QueueOptions
from rl_core.errors import AlreadySettledError, DataError, JournalError, OutdatedLeaseError
from rl_core.queue.core import QueueCore
from rl_core.queue.journal.database import SEGMENTS, SqliteJournal
from rl_core.queue.messages import PartInfo, Put
from rl_core.testing import FakeClock, make_prompt, make_prompts, ragged_like


@pytest.fixture
def opened():
    with open_queues() as opened:
        yield opened


# -- a full disk

FULL_DISK = """
import json, resource, sys
from pathlib import Path
from rl_core import InProcessQueue, QueueOptions, TaskSpec
from rl_core.errors import JournalError, OutdatedLeaseError
from rl_core.testing import make_prompts, make_trajectory

directory = Path(sys.argv[1])
queue = InProcessQueue([TaskSpec(name="train", needs=frozenset())], options=QueueOptions(directory=directory))

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def put(uid, tokens):
    queue.put(uid, 0, [make_trajectory(uid, 0, num_response_tokens=tokens)])

def ledger():
    return [(entry.prompt_uid, entry.state, entry.sessions_settled, sorted(entry.acked_by)) for entry in queue.ledger()]

said = {}

def refused(name, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except JournalError as error:
        said[name] = str(error)

queue.issue(make_prompts(40), num_sessions=1)
put("p0", 3)
put("p1", 20000)
held = queue.lease("train", groups=1)
before, slots = ledger(), len(list((directory / "segments").iterdir()))
limit((directory / "queue.sqlite3-wal").stat().st_size + 100)
refused("large", put, "p2", 1 << 20)
refused("small", put, "p3", 3)
refused("middle", put, "p4", 20000)
refused("issue", queue.issue, make_prompts(41)[40:], num_sessions=1)
refused("drop", queue.drop, "p5", reason="too easy")
said["unchanged"] = ledger() == before
said["slots"] = len(list((directory / "segments").iterdir())) - slots
said["reserved"] = queue.stats()["size_bytes/reserved"]
limit(resource.RLIM_INFINITY)
for uid, tokens in (("p2", 1 << 20), ("p3", 3), ("p4", 20000)):
    put(uid, tokens)
queue.issue(make_prompts(41)[40:], num_sessions=1)
lease = queue.lease("train", groups=5, deadline_s=0)
said["leased"] = sorted(prompt.uid for prompt in lease.prompts)
said["lease ids differ"] = lease.lease_id != held.lease_id
try:
    queue.ack(held)
except OutdatedLeaseError:
    said["old ack"] = "outdated"
queue.ack(lease)
said["ledger"] = ledger()
print(json.dumps(said))
"""


def test_a_full_disk_refuses_what_it_cannot_keep_and_the_queue_goes_on(tmp_path, opened):
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    said = json.loads(child.stdout)
    assert "no space for" in said["large"]
    assert "set capacity_bytes" in said["large"]
    for name in ("small", "middle", "issue", "drop"):
        assert str(tmp_path) in said[name], name
    assert said["unchanged"] is True
    assert (said["slots"], said["reserved"]) == (0, 0)
    assert said["leased"] == ["p0", "p1", "p2", "p3", "p4"]
    assert (said["lease ids differ"], said["old ack"]) == (True, "outdated")
    queue = opened(tmp_path)
    found = [(e.prompt_uid, e.state, e.sessions_settled, sorted(e.acked_by)) for e in queue.ledger()]
    assert found == [tuple(entry) for entry in said["ledger"]]
    assert sum(entry.state == "done" for entry in queue.ledger()) == 5


# -- a journal that cannot be written, step by step


class FullJournal(SqliteJournal):
    """A journal whose disk is full while `is_full` is set."""

    is_full = False

    def write(self, core):
        if self.is_full:
            raise JournalError("the disk is full")
        super().write(core)


@pytest.fixture
def full(tmp_path, opened):
    """Return a queue whose journal can be made full."""
    queue = opened(tmp_path, REFERENCE, TRAIN)
    queue._service._journal.__class__ = FullJournal
    return queue


def test_what_could_not_be_written_is_not_there(full):
    ready(full, num_prompts=2, large=True)
    before = entries(full)
    held = full.stats()["size_bytes"]
    lease = full.lease("reference", groups=2, deadline_s=0)
    given = {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])}
    full._service._journal.is_full = True
    for call in (
        lambda: full.ack(lease, given),
        lambda: full.drop("p0", reason="too easy"),
        lambda: full.issue(make_prompts(3)[2:], num_sessions=1),
        lambda: full.set_policy_version(5),
    ):
        with pytest.raises(JournalError, match="the disk is full"):
            call()
        assert entries(full) == before
    full._service._journal.is_full = False
    stats = full.stats()
    assert (stats["size_bytes"], stats["size_bytes/reserved"], stats["rows"]) == (held, 0, 2)
    lease = full.lease("reference", groups=2, deadline_s=0)
    full.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0, -2.0])})
    assert [sorted(entry.acked_by) for entry in full.ledger()] == [["reference"]] * 2
    assert full._service.core.policy_version == 0


def test_slots_of_what_could_not_be_written_are_used_again(full, tmp_path):
    full.issue(make_prompts(2), num_sessions=1)
    full._service._journal.is_full = True
    for _ in range(5):
        with pytest.raises(JournalError, match="the disk is full"):
            put(full, "p0", large=True)
    full._service._journal.is_full = False
    put(full, "p0", large=True)
    assert len(list((tmp_path / SEGMENTS).iterdir())) == 1


def test_rows_that_are_looked_at_stay_through_a_full_disk(full, tmp_path):
    ready(full, num_prompts=1, large=True)
    lease = full.lease("train", groups=1, deadline_s=0)
    row = lease.batch.ragged("loss_mask")[0]
    full._service._journal.is_full = True
    with pytest.raises(JournalError, match="the disk is full"):
        full.drop("p0", reason="too easy")
    full._service._journal.is_full = False
    del lease
    full.drop("p0", reason="too easy")
    full.issue([make_prompt("p1")], num_sessions=1)
    put(full, "p1", large=True)
    assert row.tolist() == [False, False, *[True] * LARGE]
    assert len(list((tmp_path / SEGMENTS).iterdir())) == 2
    del row
    full.stats()
    full.issue([make_prompt("p2")], num_sessions=1)
    put(full, "p2", large=True)
    assert len(list((tmp_path / SEGMENTS).iterdir())) == 2


# -- reserved space


class Interrupted:
    """A queue's payload that calls `event` once, while it writes rows."""

    def __init__(self, payload, event):
        self._payload, self._event = payload, event
        self.is_slow = payload.is_slow

    def __getattr__(self, name):
        return getattr(self._payload, name)

    def write(self, prepared, place):
        written = self._payload.write(prepared, place)
        event, self._event = self._event, lambda: None
        event()
        return written


def test_a_put_whose_prompt_goes_while_it_writes_keeps_no_room(tmp_path, opened):
    queue = opened(tmp_path, capacity_rows=3)
    queue.issue(make_prompts(3), num_sessions=1)
    payload = queue._payload
    queue._payload = Interrupted(payload, lambda: queue.drop("p0", reason="too easy"))
    with pytest.raises(DataError, match="'p0' is dropped"):
        put(queue, "p0", large=True)

    def put_first():
        queue._payload = payload
        put(queue, "p1", large=True)

    queue._payload = Interrupted(payload, put_first)
    with pytest.raises(AlreadySettledError):
        put(queue, "p1", large=True)
    stats = queue.stats()
    assert (stats["rows"], stats["rows/reserved"], stats["size_bytes/reserved"]) == (1, 0, 0)
    assert len(list((tmp_path / SEGMENTS).iterdir())) == 2, "one of them is free"
    put(queue, "p2", large=True)
    assert len(list((tmp_path / SEGMENTS).iterdir())) == 2


def test_an_ack_whose_lease_runs_out_while_it_writes_keeps_no_room(tmp_path):
    clock = FakeClock()
    queue = InProcessQueue([REFERENCE, TRAIN], options=QueueOptions(directory=tmp_path), clock=clock)
    ready(queue, large=True)
    lease = queue.lease("reference", groups=1, deadline_s=0, lease_s=10)
    queue._payload = Interrupted(queue._payload, lambda: clock.advance(11))
    with pytest.raises(OutdatedLeaseError, match="it expired"):
        queue.ack(lease, {"reference_logprobs": ragged_like(lease.batch, "reference_logprobs", [-1.0])})
    assert queue.stats()["size_bytes/reserved"] == 0
    assert queue.ledger()[0].acked_by == frozenset()
    queue.close()


def test_a_put_that_was_written_is_told_so_when_it_is_said_again(tmp_path):
    journal = SqliteJournal(tmp_path, [TRAIN], QueueOptions(), clock=FakeClock())
    core = QueueCore([TRAIN], QueueOptions())
    core.issue([("p0", make_prompt("p0"))], num_sessions=1, now=0.0)
    core.put(Put([("p0", [0])], [PartInfo("p0", 0, 1, 5, 100)], ["input_ids"], b"x", "put-1", 0, 1.0))
    journal.write(core)
    again = journal.load({})
    assert again.was_put("put-1", [("p0", [0])])
    assert not again.was_put("put-2", [("p0", [0])])
    journal.close()
