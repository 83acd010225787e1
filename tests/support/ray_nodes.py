"""Run a queue on three Ray nodes of one machine and kill two of them: `python ray_nodes.py`; prints the results."""

import os
import shutil
import signal
import sys
import tempfile
import threading

from rl_core import TaskSpec
from rl_core.cluster.ray.session import FAST_DEATH, RayOptions, prepare_environment
from rl_core.queue.ray.queue import RayQueue
from rl_core.testing import make_prompts, make_trajectory, wait_until

prepare_environment(RayOptions())  # before ray is imported
os.environ.update(FAST_DEATH)

import ray  # noqa: E402
import ray._private.utils  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids"}))
LONG = 20_000
DEADLINE_S = 60.0


@ray.remote(num_cpus=0)
class Worker:
    """A client of the queue that puts or leases on its own node."""

    def put(self, queue, uids):
        for uid in uids:
            queue.put(uid, 0, [make_trajectory(uid, 0, num_response_tokens=LONG)], deadline_s=DEADLINE_S)

    def lease(self, queue, lease_s):
        self.held = queue.lease("train", groups=2, deadline_s=DEADLINE_S, lease_s=lease_s)
        return [prompt.uid for prompt in self.held.prompts]


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def start_cluster(folder):
    ray._private.utils.write_ray_address = lambda *args, **kwargs: None  # it would write a shared file
    base = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": 2,
        "object_store_memory": 200 << 20,
        "include_log_monitor": False,
    }
    head = {**base, "temp_dir": folder, "include_dashboard": False, "no_monitor": True, "resources": {"n0": 10}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(wait=False, resources={f"n{i}": 10}, **base) for i in (1, 2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster, nodes


def kill(node):
    (raylet,) = [info.process for name, infos in node.all_processes.items() if name == "raylet" for info in infos]
    os.kill(raylet.pid, signal.SIGKILL)


def main():
    folder = tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp")
    cluster, nodes = start_cluster(folder)
    try:
        queue = RayQueue([TRAIN])
        queue.issue(make_prompts(4), num_sessions=1)
        producer, consumer = (Worker.options(resources={name: 1}).remote() for name in ("n1", "n2"))
        ray.get(producer.put.remote(queue, ["p0", "p1"]), timeout=DEADLINE_S)
        queue.put("p2", 0, [make_trajectory("p2", 0, num_response_tokens=LONG)])
        queue.put("p3", 0, [make_trajectory("p3", 0)])
        say("leased", ray.get(consumer.lease.remote(queue, 5.0), timeout=DEADLINE_S))
        kill(nodes[0])  # owns the rows of p0 and p1
        kill(nodes[1])  # holds their lease
        acked = []

        def consume():
            while len(acked) < 4:
                lease = queue.lease("train", groups=1, deadline_s=DEADLINE_S)
                queue.ack(lease)
                acked.extend(prompt.uid for prompt in lease.prompts)

        thread = threading.Thread(target=consume)
        thread.start()
        wait_until(lambda: len(queue.unsettled()) == 2, "the lost rows to be listed", deadline_s=3 * DEADLINE_S)
        say("unsettled", [unsettled.prompt.uid for unsettled in queue.unsettled()])
        for uid in ("p0", "p1"):
            queue.put(uid, 0, [make_trajectory(uid, 0, num_response_tokens=LONG)], deadline_s=DEADLINE_S)
        thread.join(DEADLINE_S)
        stats = queue.stats()
        say("acked", sorted(acked), int(stats["acks/train"]), int(stats["drops/lost"]))
        say("ledger", [(entry.state, entry.attempt) for entry in queue.ledger()])
        queue.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
