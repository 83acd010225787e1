"""Killed processes of a shared-memory queue lose and duplicate no rows, and leak no memory."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from queue_processes import Worker

from rl_core import QueueOptions, TaskSpec
from rl_core.errors import DeadlineError, JournalError, OutdatedLeaseError, RoleError
from rl_core.queue.in_process import InProcessQueue
from rl_core.queue.shared_memory import queue as shared_memory
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
from rl_core.testing import make_prompts, make_trajectory, wait_until

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids"}))
DEADLINE_S = 60.0
LONG = 20_000


@pytest.fixture
def started():
    things = []

    def start(thing):
        things.append(thing)
        return thing

    yield start
    for thing in reversed(things):
        thing.kill() if isinstance(thing, Worker) else thing.close()


def long_row(uid, session=0):
    return make_trajectory(uid, session, num_response_tokens=LONG)


def slots_of(queue):
    return sorted(path.name for path in (Path(queue.address) / "segments").glob("*.slot"))


def test_a_producer_killed_in_the_middle_of_a_put_leaves_nothing_behind(started):
    queue = started(SharedMemoryQueue([TRAIN], options=QueueOptions(capacity_rows=1)))
    queue.issue(make_prompts(1), num_sessions=1)
    worker = started(Worker("hang_in_put", queue.address))
    worker.wait_for("writing")
    assert (queue.stats()["rows"], queue.stats()["rows/reserved"]) == (0, 1)
    worker.kill()
    wait_until(lambda: queue.stats()["rows/reserved"] == 0, "the room to be free", deadline_s=DEADLINE_S)
    assert queue.ledger()[0].sessions_settled == 0
    queue.put("p0", 0, [long_row("p0")], deadline_s=0)
    assert len(slots_of(queue)) == 1  # the half-written slot is reused
    lease = queue.lease("train", groups=1, deadline_s=0)
    assert lease.batch.ragged("input_ids")[0].tolist() == [1, 2] + [0] * LONG
    queue.ack(lease)


def test_groups_of_a_killed_consumer_are_delivered_again_at_once_and_its_slots_are_free(started):
    queue = started(SharedMemoryQueue([TRAIN]))
    queue.issue(make_prompts(3), num_sessions=1)
    queue.put("p0", 0, [long_row("p0")])
    worker = started(Worker("hold_lease", queue.address))
    assert worker.wait_for("leased") == "leased p0 3"
    with pytest.raises(DeadlineError, match="1 leased"):
        queue.lease("train", groups=1, deadline_s=0)
    worker.kill()
    lease = queue.lease("train", groups=1, deadline_s=DEADLINE_S)
    assert lease.prompts[0].uid == "p0"
    queue.ack(lease)
    del lease
    queue.ledger()  # the server reads other connections before it answers
    queue.put("p1", 0, [long_row("p1")])
    assert len(slots_of(queue)) == 1
    lease = queue.lease("train", groups=1, deadline_s=0)
    queue.ack(lease)
    rows = lease.batch.ragged("input_ids")
    queue.put("p2", 0, [long_row("p2")])
    assert len(slots_of(queue)) == 2  # the slot of rows in use is kept
    assert rows[0][:2].tolist() == [1, 2]


def test_a_killed_server_goes_on_where_its_journal_ends(started, tmp_path):
    queue = started(SharedMemoryQueue([TRAIN], options=QueueOptions(directory=tmp_path)))
    queue.issue(make_prompts(4), num_sessions=1)
    for uid in ("p0", "p1", "p2"):
        queue.put(uid, 0, [long_row(uid)])
    queue.ack(queue.lease("train", groups=1, deadline_s=0))
    lease = queue.lease("train", groups=1, deadline_s=0)
    rows = lease.batch.ragged("input_ids")
    waiter = threading.Thread(target=lambda: leases.append(queue.lease("train", groups=3, deadline_s=DEADLINE_S)))
    leases = []
    waiter.start()
    wait_until(lambda: queue.stats()["waiting/lease"] == 1, "a waiter", deadline_s=DEADLINE_S)
    before = queue.server_pid
    os.kill(before, signal.SIGKILL)
    assert [entry.state for entry in queue.ledger()] == ["done", "settled", "settled", "issued"]
    assert queue.server_pid != before
    with pytest.raises(OutdatedLeaseError):
        queue.ack(lease)
    queue.put("p3", 0, [long_row("p3")])
    waiter.join(DEADLINE_S)
    assert [prompt.uid for prompt in leases[0].prompts] == ["p1", "p2", "p3"]
    assert rows[0].tolist() == [1, 2] + [0] * LONG
    queue.ack(leases[0])


def test_a_killed_server_without_a_journal_is_an_error_that_says_so(started):
    queue = started(SharedMemoryQueue([TRAIN]))
    queue.issue(make_prompts(1), num_sessions=1)
    os.kill(queue.server_pid, signal.SIGKILL)
    with pytest.raises(RoleError, match=r"server .* killed by SIGKILL.* no journal"):
        queue.ledger()


def test_after_everything_is_killed_the_ledger_is_the_same(tmp_path):
    source = f"""
import os, sys
from rl_core import QueueOptions, TaskSpec
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
from rl_core.testing import make_prompts, make_trajectory
queue = SharedMemoryQueue([TaskSpec(name="train", needs=frozenset({{"input_ids"}}))],
                          options=QueueOptions(directory={str(tmp_path)!r}))
queue.issue(make_prompts(5), num_sessions=2)
for uid in ("p0", "p1", "p2"):
    for session in range(2):
        queue.put(uid, session, [make_trajectory(uid, session, num_response_tokens={LONG} if uid != "p1" else 5)])
queue.put("p3", 0, [make_trajectory("p3", 0)])
queue.ack(queue.lease("train", groups=1))
lease = queue.lease("train", groups=1)
print(queue.server_pid, queue.address, flush=True)
sys.stdin.read()
"""
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", source]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    pid, address = process.stdout.readline().split()
    os.kill(int(pid), signal.SIGSTOP)  # so that it cannot shut down cleanly when its owner dies
    process.kill()
    os.kill(int(pid), signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists(), "the server to be gone", deadline_s=DEADLINE_S)

    queue = InProcessQueue([TRAIN], options=QueueOptions(directory=tmp_path))
    assert [(e.state, e.sessions_settled) for e in queue.ledger()] == [
        ("done", 2),
        ("settled", 2),
        ("settled", 2),
        ("issued", 1),
        ("issued", 0),
    ]
    assert [(u.prompt.uid, u.sessions) for u in queue.unsettled()] == [("p3", (1,)), ("p4", (0, 1))]
    assert queue.recovery().num_acks == 1
    lease = queue.lease("train", groups=2, deadline_s=0)
    assert [prompt.uid for prompt in lease.prompts] == ["p1", "p2"]
    assert lease.batch.ragged("input_ids").lengths.tolist() == [7, 7, LONG + 2, LONG + 2]
    queue.close()

    assert Path(address).exists()  # no process was left to remove it
    SharedMemoryQueue([TRAIN]).close()
    assert not Path(address).exists()


ANOTHER_RUN = """
from rl_core import TaskSpec
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
SharedMemoryQueue([TaskSpec(name="train", needs=frozenset())]).close()
"""


def start_another_run():
    """Open and close a queue in another process, which removes the leftovers of killed owners."""
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", ANOTHER_RUN], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.one_python("other tests of this file kill owners and servers")
def test_a_run_that_starts_leaves_the_queue_whose_killed_server_is_started_again(started, tmp_path, monkeypatch):
    queue = started(SharedMemoryQueue([TRAIN], options=QueueOptions(directory=tmp_path)))
    queue.issue(make_prompts(1), num_sessions=1)
    server = queue._server
    start, is_restarting, go_on = server._start, threading.Event(), threading.Event()

    def start_late():
        is_restarting.set()
        assert go_on.wait(DEADLINE_S)
        return start()

    monkeypatch.setattr(server, "_start", start_late)
    os.kill(queue.server_pid, signal.SIGKILL)
    try:
        assert is_restarting.wait(DEADLINE_S)  # the server is dead and its replacement has not started
        start_another_run()
        assert Path(queue.address).is_dir()
    finally:
        go_on.set()
    assert [entry.prompt_uid for entry in queue.ledger()] == ["p0"]


@pytest.mark.one_python("other tests of this file kill owners and servers")
def test_what_a_killed_owner_left_is_swept_once_its_server_is_gone_too(tmp_path):
    source = f"""
import sys
from rl_core import QueueOptions, TaskSpec
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
queue = SharedMemoryQueue([TaskSpec(name="train", needs=frozenset())],
                          options=QueueOptions(directory={str(tmp_path)!r}))
print(queue.server_pid, queue.address, flush=True)
sys.stdin.read()
"""
    path = os.pathsep.join(p for p in sys.path if p)
    owner = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with owner:
        pid, address = owner.stdout.readline().split()
        os.kill(int(pid), signal.SIGSTOP)  # so that it cannot shut down cleanly when its owner dies
        try:
            owner.kill()
            owner.wait(DEADLINE_S)
            start_another_run()
            assert Path(address).is_dir()  # the server may still write to it
        finally:
            os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists(), "the server to be gone", deadline_s=DEADLINE_S)
    start_another_run()
    assert not Path(address).exists()


def test_a_server_ends_with_its_owner(tmp_path):
    source = """
from rl_core import TaskSpec
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
import os, signal
queue = SharedMemoryQueue([TaskSpec(name="train", needs=frozenset())])
print(queue.server_pid, queue.address, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join(p for p in sys.path if p)
    found = subprocess.run(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    pid, address = found.stdout.split()
    wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists(), "the server to end", deadline_s=DEADLINE_S)
    wait_until(lambda: not Path(address).exists(), "its memory to be removed", deadline_s=DEADLINE_S)


def test_a_server_that_stands_still_is_named(started, monkeypatch):
    queue = started(SharedMemoryQueue([TRAIN]))
    monkeypatch.setattr(shared_memory, "GRACE_S", 0.2)
    monkeypatch.setattr(shared_memory, "DEFAULT_DEADLINE_S", 0.2, raising=False)
    os.kill(queue.server_pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=rf"server \(pid {queue.server_pid}\).*did not answer"):
            queue.lease("train", groups=1, deadline_s=0.1)
    finally:
        os.kill(queue.server_pid, signal.SIGCONT)


def test_a_pickled_queue_and_one_in_a_fork_are_the_same_queue(started):
    queue = started(SharedMemoryQueue([TRAIN]))
    queue.issue(make_prompts(1), num_sessions=1)
    copy = pickle.loads(pickle.dumps(queue))
    assert [entry.prompt_uid for entry in copy.ledger()] == ["p0"]
    copy.close()
    child = os.fork()
    if child == 0:
        try:
            queue.put("p0", 0, [long_row("p0")])
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert queue.lease("train", groups=1, deadline_s=DEADLINE_S).batch.ragged("input_ids").lengths.tolist() == [
        LONG + 2
    ]


def test_nobody_answers_at_an_address_that_is_gone():
    queue = SharedMemoryQueue([TRAIN])
    queue.close()
    with pytest.raises(RoleError, match="no queue answers"):
        SharedMemoryQueue.connect(queue.address)


def test_a_journal_in_use_is_refused(started, tmp_path):
    started(SharedMemoryQueue([TRAIN], options=QueueOptions(directory=tmp_path)))
    with pytest.raises(JournalError, match="open in another process"):
        SharedMemoryQueue([TRAIN], options=QueueOptions(directory=tmp_path))


def test_what_one_process_writes_another_reads_bit_for_bit(started):
    queue = started(SharedMemoryQueue([TRAIN]))
    queue.issue(make_prompts(1), num_sessions=1)
    values = np.random.default_rng(0).normal(size=LONG + 2).astype(np.float32)
    queue.put("p0", 0, [make_trajectory("p0", 0, num_response_tokens=LONG, rollout_logprobs=values)])
    other = started(SharedMemoryQueue.connect(queue.address))
    found = other.lease("train", groups=1, deadline_s=0).batch.ragged("rollout_logprobs")[0]
    assert found.tobytes() == values.tobytes()
