"""Invalid arguments of a queue raise a typed error before anything changes."""

import gc
import math
import os

import numpy as np
import pytest

from rl_core import Batch, InProcessQueue, QueueOptions, Ragged, RowKey, SharedMemoryQueue, TaskSpec
from rl_core.data.columns import COLUMNS, ColumnSpec, declare_column
from rl_core.errors import DataError, DeadlineError, JournalError, RLError, SettingsError, ShapeError
from rl_core.queue.messages import encode_frame
from rl_core.testing import make_prompt, make_prompts, make_trajectory, ragged_like

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids"}))
LONG = 40_000


KINDS = ("memory", "journal", "shm")


def start(kind, folder):
    options = QueueOptions(directory=folder if kind == "journal" else None)
    queue = (SharedMemoryQueue if kind == "shm" else InProcessQueue)([TRAIN], options=options)
    queue.issue(make_prompts(1), num_sessions=2)
    return queue


@pytest.fixture(params=KINDS)
def queue(request, tmp_path):
    queue = start(request.param, tmp_path)
    yield queue
    queue.close()


@pytest.fixture(scope="module", params=KINDS)
def refusing_queue(request, tmp_path_factory):
    """A queue whose tests put nothing into it, because it refuses all that they try."""
    queue = start(request.param, tmp_path_factory.mktemp("queue"))
    yield queue
    queue.close()


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_times_that_are_none_are_refused(queue, value):
    with pytest.raises(SettingsError, match="deadline_s of claim must be"):
        queue.claim(prompts=1, deadline_s=value)
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    queue.put("p0", 1, [])
    with pytest.raises(SettingsError, match="lease_s"):
        queue.lease("train", groups=1, lease_s=value, deadline_s=0)
    lease = queue.lease("train", groups=1, deadline_s=0)
    with pytest.raises(SettingsError, match="lease_s"):
        queue.extend(lease, lease_s=value)
    queue.ack(lease)


def test_numbers_of_numpy_are_numbers(queue):
    queue.issue([make_prompt("n")], num_sessions=np.int64(2))
    queue.fail("n", np.int64(1), reason="engine aborted")
    queue.set_policy_version(np.int64(3))
    queue.put("n", np.int32(0), [])
    assert queue.ledger()[1].state == "dropped"
    for wrong in (2.5, "2", None, 1 << 70):
        with pytest.raises(SettingsError, match="num_sessions"):
            queue.issue([make_prompt("m")], num_sessions=wrong)
    assert len(queue.ledger()) == 2


def test_reasons_may_be_any_text(queue):
    queue.fail("p0", 0, reason="bad \ud800")
    queue.drop("p0", reason="")
    assert queue.ledger()[0].reason == "no reason"
    assert "d800" in queue.ledger()[0].sessions_failed[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": np.array([1, 2, 3, 4, 2**40 + 7])}, r"input_ids of Trajectory\(.*\) must be \[T\] int32"),
        ({"input_ids": np.array([1.5, 2, 3, 4, 5])}, "must be .* int32"),
        ({"policy_versions": np.array([-1, -1, 0, 0, 2**40])}, "policy_versions"),
        ({"loss_mask": np.array([0, 0, 1, 1, 2])}, "loss_mask"),
        ({"extras": [1, 2]}, "extras of .* must be a mapping"),
        ({"output_index": -1}, "below 0"),
    ],
)
def test_rows_that_would_change_are_refused_when_put(refusing_queue, fields, words):
    fields = dict(fields)
    output = fields.pop("output_index", 0)
    with pytest.raises((DataError, ShapeError), match=words):
        refusing_queue.put("p0", 0, [make_trajectory("p0", 0, output, **fields)])
    assert refusing_queue.ledger()[0].sessions_settled == 0


def test_columns_of_the_table_have_one_value_a_row_or_token():
    ids = np.zeros((3, 2), np.int32)
    with pytest.raises(ShapeError, match="one value a token"):
        Batch([RowKey("p0", 0, 0)], {"input_ids": Ragged(ids, np.array([0, 3]))})
    with pytest.raises(ShapeError, match="one value a row"):
        Batch([RowKey("p0", 0, 0)], {"reward": np.zeros((1, 2), np.float32)})
    with pytest.raises(ShapeError, match="int64"):
        Ragged(np.zeros(3, np.int32), np.array([0, 3], np.int32))


def test_a_consumer_that_lacks_a_column_harms_no_rows():
    declare_column("border_column", ColumnSpec(dtype="float32", is_ragged=False, meaning="A test's."))
    queue = SharedMemoryQueue([TaskSpec(name="train", needs=frozenset())])
    queue.issue(make_prompts(1), num_sessions=1)
    queue.put_batch(Batch([RowKey("p0", 0, 0)], {"border_column": np.ones(1, np.float32)}))
    spec = COLUMNS.pop("border_column")  # simulates a process that has not declared the column
    with pytest.raises(DataError, match=r"'border_column'.*declare_column"):
        queue.lease("train", groups=1, deadline_s=0)
    COLUMNS["border_column"] = spec
    assert queue.lease("train", groups=1, deadline_s=0).batch.dense("border_column").tolist() == [1.0]
    queue.close()


def test_a_fork_that_drops_its_parents_lease_leaves_the_rows_alone():
    queue = SharedMemoryQueue([TRAIN])
    queue.issue(make_prompts(2), num_sessions=1)
    queue.put("p0", 0, [make_trajectory("p0", 0, num_response_tokens=LONG)])
    lease = queue.lease("train", groups=1, deadline_s=0)
    child = os.fork()
    if child == 0:
        del lease
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    queue.ack(lease)
    queue.put("p1", 0, [make_trajectory("p1", 0, num_response_tokens=LONG, input_ids=np.full(LONG + 2, 77, np.int32))])
    assert lease.batch.ragged("input_ids")[0][:3].tolist() == [1, 2, 0]
    queue.close()


def test_full_stays_full_while_a_task_could_take_what_is_ready():
    score = TaskSpec(name="score", needs=frozenset({"input_ids"}), gives=frozenset({"values"}))
    train = TaskSpec(name="train", needs=frozenset({"values"}))
    queue = SharedMemoryQueue([score, train], options=QueueOptions(capacity_rows=2))
    queue.issue(make_prompts(3), num_sessions=1)
    for uid in ("p0", "p1"):
        queue.put(uid, 0, [make_trajectory(uid, 0)])
    other = SharedMemoryQueue.connect(queue.address)
    stream, _ = other._open(1e12)
    from rl_core.queue.messages import LeaseRequest

    stream.sendall(encode_frame(LeaseRequest("train", 1, 60.0, 60.0, False)))  # this lease waits for rows
    with pytest.raises(DeadlineError, match="2 of 2 rows stored"):
        queue.put("p2", 0, [make_trajectory("p2", 0)], deadline_s=0.2)
    lease = queue.lease("score", groups=1, deadline_s=0)
    queue.ack(lease, {"values": ragged_like(lease.batch, "values", [0.5])})
    stream.close()
    other.close()
    queue.close()


@pytest.mark.parametrize("body", [b"\x92\xaaStateQuery\xa2\xff\xfe", b"\x91" * 100_000 + b"\x01"])
def test_frames_that_cannot_be_read_leave_the_server_alone(body):
    queue = SharedMemoryQueue([TRAIN])
    stream, _ = queue._open(1e12)
    stream.sendall(len(body).to_bytes(4, "little") + body)
    stream.close()
    assert queue.ledger() == []
    queue.close()


def test_segments_without_a_journal_are_not_thrown_away(tmp_path):
    queue = InProcessQueue([TRAIN], options=QueueOptions(directory=tmp_path))
    queue.issue(make_prompts(1), num_sessions=1)
    queue.put("p0", 0, [make_trajectory("p0", 0, num_response_tokens=LONG)])
    queue.close()
    for path in tmp_path.glob("queue.sqlite3*"):
        path.unlink()
    with pytest.raises(JournalError, match="1 segments and an empty"):
        InProcessQueue([TRAIN], options=QueueOptions(directory=tmp_path))
    assert len(list((tmp_path / "segments").iterdir())) == 1


def test_every_refusal_is_one_of_ours(refusing_queue):
    for groups in (0, 2**70):
        with pytest.raises(RLError):
            refusing_queue.lease("train", groups=groups)
