"""Run roles on three Ray nodes of one machine and kill one node: `python ray_role_nodes.py`; prints the results."""

import asyncio
import os
import shutil
import signal
import tempfile
import time

from cluster_conformance.checks import death_of
from ray_nodes import DEADLINE_S, kill, ray, say, start_cluster  # first, because it sets Ray's authentication

from rl_core.cluster import ClusterOptions, ResourcePool, RestartPolicy, RoleSpec, open_cluster
from rl_core.cluster.processes.guard import is_running
from rl_core.cluster.ray.role_process import dump_there, read_there
from rl_core.errors import RLError
from rl_core.testing import wait_until

ECHO = "cluster_conformance.role:EchoRole"


def node_of(role):
    return role._current._hello.node


async def refused(work):
    try:
        await work
    except RLError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


async def main(nodes):
    async with open_cluster(ClusterOptions(kind="ray")) as cluster:
        for strategy, size in (("strict_spread", 4), ("strict_pack", 3), ("pack", 7)):
            pool = ResourcePool(name=strategy, size=size, cpus=1, strategy=strategy)
            start = cluster.start_group(RoleSpec(name="echo", factory=ECHO), size=1, pool=pool, deadline_s=DEADLINE_S)
            kind, text = await refused(start)
            say("refused", kind, text[text.index("enough for") :].partition(".")[0], text.count("2 CPUs and 0 GPUs"))
        apart = ResourcePool(name="apart", size=3, cpus=1, strategy="strict_spread")
        learners = await cluster.start_group(
            RoleSpec(name="learner", factory=ECHO), size=3, pool=apart, deadline_s=DEADLINE_S
        )
        spread = ResourcePool(name="spread", size=3, cpus=0.5, strategy="spread")
        healed = RoleSpec(name="engine", factory=ECHO, restart=RestartPolicy(max_restarts=1, backoff_s=0.1))
        engines = await cluster.start_group(healed, size=3, pool=spread, deadline_s=DEADLINE_S)
        say("nodes", len({node_of(role) for role in learners}), len({node_of(role) for role in engines}))

        far = next(role for role in learners if node_of(role) == nodes[0].node_id)
        await far.call("say", "last words from afar")
        said = await asyncio.to_thread(read_there, far._current._hello, DEADLINE_S)
        say("afar", "last words from afar" in said)
        asked = await far.stacks(deadline_s=DEADLINE_S)
        dumped = await asyncio.to_thread(dump_there, far._current._hello, far._current._mark, DEADLINE_S)
        say(
            "stacks",
            "its event loop is responsive" in asked,
            "Stacks dumped by signal" in dumped,
            "Thread 0x" in dumped,
        )
        os.kill(far.pid, signal.SIGKILL)
        error = await death_of(far)
        say("process", f"learner[{far.rank}]" in str(error), "last words from afar" in str(error))

        lost = next(role for role in learners if node_of(role) == nodes[1].node_id)
        moved = [role for role in engines if node_of(role) == nodes[1].node_id]
        child = await lost.call("start_child", own_session=True)
        deaths = [asyncio.ensure_future(death_of(role)) for role in (lost, *moved)]
        await asyncio.sleep(0)
        began_at = time.monotonic()
        kill(nodes[1])
        errors = await asyncio.gather(*deaths)
        took_s = time.monotonic() - began_at
        say("took", took_s)
        say("node", took_s < 5.0, f"learner[{lost.rank}]" in str(errors[0]), len(moved))
        say("moved", await engines.call_all("greet", "you"), [role.incarnation for role in moved])
        say("gone", nodes[1].node_id not in {node_of(role) for role in engines})
        wait_until(lambda: not is_running(child), "the lost role's child to end")


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp")
    started, added = start_cluster(folder)
    try:
        asyncio.run(main(added))
    finally:
        ray.shutdown()
        started.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
