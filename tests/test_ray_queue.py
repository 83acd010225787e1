"""The queue on Ray: the backend's part of the conformance suite, and checks specific to Ray."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_core import QueueOptions, TaskSpec
from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.errors import JournalError, RoleError
from rl_core.queue.ray.queue import RayQueue
from rl_core.testing import QueueBackendConformance, make_prompts, make_trajectory, wait_until

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids"}))
LONG = 20_000
DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def ray():
    yield start_ray(RayOptions(num_cpus=2, object_store_bytes=300 << 20))
    stop_ray()


class TestRayQueue(QueueBackendConformance):
    def make_queue(self, tasks, *, options, clock):
        return RayQueue(tasks, options=options, clock=clock)


@pytest.fixture
def queue_on():
    queues = []

    def make(**options):
        queues.append(RayQueue([TRAIN], options=QueueOptions(**options)))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def put_long(queue, uid, *, session=0):
    queue.put(uid, session, [make_trajectory(uid, session, num_response_tokens=LONG)], deadline_s=DEADLINE_S)


def storage_of(queue, ray):
    """Return the actor that owns this node's rows."""
    node = ray.get_runtime_context().get_node_id()
    return ray.get(queue._server.storage.remote(node), timeout=DEADLINE_S)[0]


def kill_actor_process(ray, actor):
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=DEADLINE_S)
    os.kill(pid, signal.SIGKILL)


def test_every_socket_of_ray_is_on_loopback(ray):
    listening = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.environ["RAY_AUTH_TOKEN"].encode() not in (process / "environ").read_bytes():
                continue  # belongs to another Ray
            inodes = {str(link.readlink()) for link in (process / "fd").iterdir()}
            lines = [
                line for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()[1:]
            ]
        except OSError:
            continue  # the process has ended
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.add(fields[1].split(":")[0])
    assert listening
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert listening <= loopback


def test_a_client_with_another_token_is_refused(ray):
    address = ray.get_runtime_context().gcs_address
    source = f"""
from rl_core.errors import RoleError
from rl_core.cluster.ray.session import RayOptions, start_ray
try:
    start_ray(RayOptions(address={address!r}))
except RoleError as error:
    print("refused:", error)
"""
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "2"}
    found = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "refused: the Ray cluster at" in found.stdout


def test_an_actor_puts_and_another_leases(ray, queue_on):
    queue = queue_on()
    queue.issue(make_prompts(2), num_sessions=1)

    @ray.remote(num_cpus=0)
    def produce(queue, uid):
        put_long(queue, uid)

    ray.get([produce.remote(queue, uid) for uid in ("p0", "p1")], timeout=DEADLINE_S)
    lease = queue.lease("train", groups=2, deadline_s=DEADLINE_S)
    assert lease.batch.ragged("input_ids").lengths.tolist() == [LONG + 2] * 2
    assert not lease.batch.ragged("input_ids")[0].flags.writeable
    queue.ack(lease)


def test_rows_outlive_the_process_that_put_them(ray, queue_on):
    queue = queue_on()
    queue.issue(make_prompts(1), num_sessions=1)

    @ray.remote(num_cpus=0, max_restarts=0)
    class Producer:
        def put(self, queue):
            put_long(queue, "p0")
            return os.getpid()

    producer = Producer.remote()
    pid = ray.get(producer.put.remote(queue), timeout=DEADLINE_S)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the producer to be gone", deadline_s=DEADLINE_S)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(producer.put.remote(queue), timeout=DEADLINE_S)
    assert queue.lease("train", groups=1, deadline_s=DEADLINE_S).batch.ragged("input_ids").lengths.tolist() == [
        LONG + 2
    ]


def test_rows_of_a_killed_storage_are_generated_again(ray, queue_on):
    queue = queue_on()
    queue.issue(make_prompts(2), num_sessions=1)
    put_long(queue, "p0")
    queue.put("p1", 0, [make_trajectory("p1", 0)])  # small rows stay in the server
    kill_actor_process(ray, storage_of(queue, ray))

    def lost():
        lease = queue.lease(
            "train", groups=1, deadline_s=DEADLINE_S
        )  # the killed owner's rows may remain visible for a moment
        queue.release(lease)
        return [prompt.uid for prompt in lease.prompts] == ["p1"]

    wait_until(lost, "the rows to be lost", deadline_s=DEADLINE_S)
    (entry, _) = queue.ledger()
    assert (entry.state, entry.attempt, [u.prompt.uid for u in queue.unsettled()]) == ("issued", 2, ["p0"])
    assert queue.stats()["drops/lost"] == 1
    put_long(queue, "p0")  # stored by a new actor
    lease = queue.lease("train", groups=2, deadline_s=DEADLINE_S)
    queue.ack(lease)
    assert {entry.state for entry in queue.ledger()} == {"done"}


def test_with_a_journal_rows_of_a_killed_storage_come_from_their_files(ray, queue_on, tmp_path):
    queue = queue_on(directory=tmp_path)
    queue.issue(make_prompts(1), num_sessions=1)
    put_long(queue, "p0")
    kill_actor_process(ray, storage_of(queue, ray))
    lease = queue.lease("train", groups=1, deadline_s=DEADLINE_S)
    assert lease.batch.ragged("input_ids").lengths.tolist() == [LONG + 2]
    queue.ack(lease)
    assert queue.ledger()[0].attempt == 1
    assert not list((tmp_path / "segments").iterdir())


def test_a_killed_server_goes_on_where_its_journal_ends(ray, queue_on, tmp_path):
    queue = queue_on(directory=tmp_path)
    queue.issue(make_prompts(3), num_sessions=1)
    for uid in ("p0", "p1"):
        put_long(queue, uid)
    queue.ack(queue.lease("train", groups=1, deadline_s=DEADLINE_S))
    lease = queue.lease("train", groups=1, deadline_s=DEADLINE_S)
    os.kill(queue.server_pid, signal.SIGKILL)
    assert [entry.state for entry in queue.ledger()] == ["done", "settled", "issued"]
    with pytest.raises(RuntimeError, match="outdated"):
        queue.ack(lease)
    again = queue.lease("train", groups=1, deadline_s=DEADLINE_S)
    assert again.prompts[0].uid == "p1"
    assert np.array_equal(again.batch.ragged("input_ids")[0], lease.batch.ragged("input_ids")[0])
    queue.ack(again)
    put_long(queue, "p2")
    assert queue.recovery().num_acks == 1


def test_a_killed_server_without_a_journal_is_an_error_that_says_so(ray, queue_on):
    queue = queue_on()
    queue.issue(make_prompts(1), num_sessions=1)
    os.kill(queue.server_pid, signal.SIGKILL)
    with pytest.raises(RoleError, match="no journal"):
        wait_until(lambda: bool(queue.ledger()) and False, "the server to be gone", deadline_s=DEADLINE_S)


def test_a_directory_of_another_queue_is_refused(ray, queue_on, tmp_path):
    queue_on(directory=tmp_path)
    with pytest.raises(JournalError, match="open in another process"):
        queue_on(directory=tmp_path)
