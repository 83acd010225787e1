"""Engines on Ray whose owner is itself an actor."""

import asyncio
import os
import signal

import nested_rollouter
import pytest
from cluster_conformance.checks import death_of

from rl_core.cluster import ClusterOptions, RestartPolicy, RoleSpec, open_cluster
from rl_core.cluster.processes.guard import is_running
from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.testing import wait_until
from rl_rollout.testing import make_tiny_model

NUM_CPUS = 2


@pytest.fixture(scope="module", autouse=True)
def ray():
    yield start_ray(RayOptions(num_cpus=NUM_CPUS, object_store_bytes=300 << 20))
    stop_ray()


def test_engines_of_an_actor_end_with_it_and_leave_their_resources_to_the_next(tmp_path):
    """After kill -9 of the rollouter, its engine ends too, and the restarted rollouter can reserve all CPUs again."""
    options = ClusterOptions(kind="ray")
    spec = RoleSpec(
        name="rollouter",
        factory=f"{nested_rollouter.__name__}:Rollouter",
        kwargs={"model_dir": make_tiny_model(tmp_path, is_tied=True), "num_cpus": NUM_CPUS, "cluster": options},
        restart=RestartPolicy(max_restarts=1, backoff_s=0.1),
    )

    async def go():
        async with open_cluster(options) as cluster:
            rollouter = await cluster.start(spec, deadline_s=120)
            engine = await rollouter.call("start", deadline_s=300)
            tokens = await rollouter.call("generate", deadline_s=60)
            os.kill(rollouter.pid, signal.SIGKILL)
            await death_of(rollouter)
            await asyncio.to_thread(wait_until, lambda: not is_running(engine), "the engine to end", deadline_s=60)
            another = await rollouter.call("start", deadline_s=300)
            again = await rollouter.call("generate", deadline_s=60)
            return tokens, again, engine, another

    tokens, again, engine, another = asyncio.run(go())
    assert tokens == again
    assert len(tokens) > 0
    assert engine != another
    wait_until(lambda: not is_running(another), "the engine to end with the rollouter", deadline_s=60)
