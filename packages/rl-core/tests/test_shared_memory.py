"""The queue in shared memory: the conformance suite over a socket, and specific checks."""

import resource
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from queue_conformance import QueueConformance

from rl_core import Batch, QueueOptions, RowKey, TaskSpec
from rl_core.data.columns import ColumnSpec, declare_column
from rl_core.queue.messages import Hello, LeaseRequest, StateQuery, encode_frame
from rl_core.queue.shared_memory import queue as shared_memory
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
from rl_core.queue.shared_memory.server import QueueServer
from rl_core.testing import make_prompts, make_trajectory, wait_until

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids"}))


class _Served(SharedMemoryQueue):
    """A queue whose server runs in a thread of this process, so that a test controls its clock."""

    server: QueueServer
    thread: threading.Thread

    def close(self) -> None:
        self.server.stop()
        self.thread.join()
        super().close()


class TestSharedMemoryQueue(QueueConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.tmp_path = tmp_path
        self.num_made = 0

    def make_queue(self, tasks, *, options, clock):
        self.num_made += 1
        server = QueueServer(self.tmp_path / str(self.num_made), tasks, options, clock=clock)
        thread = threading.Thread(target=server.serve)
        thread.start()
        queue = _Served.connect(str(self.tmp_path / str(self.num_made)))
        queue.server, queue.thread = server, thread
        return queue


@pytest.fixture
def queue():
    queue = SharedMemoryQueue([TRAIN])
    yield queue
    queue.close()


def connection_of(queue):
    """Open another connection as the queue's client, for hand-written messages."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(20)
    stream.connect(str(Path(queue.address) / "socket"))
    stream.sendall(encode_frame(Hello(queue._client)))
    shared_memory.receive(stream, time.monotonic() + 20)
    return stream


ASK_FOR_ONE = LeaseRequest("train", 1, 3600.0, 600.0, False)


def test_a_lease_that_is_broken_off_while_it_waits_goes_to_nobody(queue):
    queue.issue(make_prompts(1), num_sessions=1)
    with connection_of(queue) as stream:
        stream.sendall(encode_frame(ASK_FOR_ONE))
        wait_until(lambda: queue.stats()["waiting/lease"] == 1, "the lease to wait")
    wait_until(lambda: queue.stats()["waiting/lease"] == 0, "the lease to be forgotten")
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    assert queue.lease("train", groups=1, deadline_s=0).prompts[0].uid == "p0"


def test_a_lease_whose_answer_nobody_heard_is_taken_back(queue):
    queue.issue(make_prompts(1), num_sessions=1)
    queue.put("p0", 0, [make_trajectory("p0", 0)])
    with connection_of(queue) as stream:
        stream.sendall(encode_frame(ASK_FOR_ONE))
        wait_until(lambda: queue.stats()["leases"] == 1, "the lease")
    assert queue.lease("train", groups=1, deadline_s=60).prompts[0].uid == "p0"


@pytest.mark.parametrize("size", [4, 1 << 20, (1 << 32) - 1])
def test_garbage_on_the_socket_harms_nobody(queue, size):
    with connection_of(queue) as stream:
        stream.sendall(size.to_bytes(4, "little") + b"\xc1" * 100)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(str(Path(queue.address) / "socket"))
        stream.sendall(encode_frame(ASK_FOR_ONE))  # without the Hello message
        with pytest.raises(AssertionError, match="the first message must be Hello"):
            raise AssertionError(shared_memory.receive(stream, time.monotonic() + 20))
    assert queue.ledger() == []


def test_a_server_without_descriptors_turns_clients_away_and_goes_on(queue):
    assert queue.ledger() == []  # opens the queue's own connection
    resource.prlimit(queue.server_pid, resource.RLIMIT_NOFILE, (24, 24))
    streams = []
    for _ in range(40):
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(str(Path(queue.address) / "socket"))
        streams.append(stream)
    queue.issue(make_prompts(1), num_sessions=1)
    for stream in streams:
        stream.close()
    other = SharedMemoryQueue.connect(queue.address)
    assert [entry.prompt_uid for entry in other.ledger()] == ["p0"]
    other.close()


def test_clients_leave_descriptors_for_slots(queue):
    queue.issue(make_prompts(1), num_sessions=1)
    resource.prlimit(queue.server_pid, resource.RLIMIT_NOFILE, (24, 24))
    streams = []
    for _ in range(40):
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(20)
        stream.connect(str(Path(queue.address) / "socket"))
        streams.append(stream)
    assert streams[-1].recv(1) == b""  # turned away
    queue.put("p0", 0, [make_trajectory("p0", 0, num_response_tokens=40_000)])  # needs a slot
    assert queue.stats()["groups/settled"] == 1
    for stream in streams:
        stream.close()


def test_a_client_that_reads_no_answers_delays_nobody(queue):
    queue.issue(make_prompts(2_000), num_sessions=1)
    with connection_of(queue) as stream:
        stream.sendall(encode_frame(StateQuery("ledger")) * 20)
        assert queue.stats()["groups/issued"] == 2_000
        queue.close()
    assert queue._server._process.returncode == 0  # it did not have to be killed


@pytest.mark.parametrize("error", [OSError("broken"), KeyError("broken")])
def test_an_unexpected_error_ends_the_server(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    server = QueueServer(tmp_path / "queue", [TRAIN], QueueOptions())
    monkeypatch.setattr(server.service, "submit", fail)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(str(tmp_path / "queue" / "socket"))
        stream.sendall(encode_frame(Hello("client")) + encode_frame(ASK_FOR_ONE))
        with pytest.raises(type(error), match="broken"):
            server.serve()


def test_own_columns_can_be_needed_and_reach_another_process(queue):
    declare_column("own_scores", ColumnSpec(dtype="float64", is_ragged=False, meaning="A test's."))
    other = SharedMemoryQueue([TaskSpec(name="train", needs=frozenset({"own_scores"}))])
    other.issue(make_prompts(1), num_sessions=2)
    keys = [RowKey("p0", session, 0) for session in range(2)]
    other.put_batch(Batch(keys, {"own_scores": np.asarray([0.25, 0.5])}))
    assert other.lease("train", groups=1, deadline_s=0).batch.dense("own_scores").tolist() == [0.25, 0.5]
    other.close()
