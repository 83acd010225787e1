"""`scale` with weights over the network: the learner expects the requested number of engines, despite deaths."""

import asyncio
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_async_trainer.controller.links import LearnerLink
from rl_async_trainer.liveness.role_activity import answer_request
from rl_async_trainer.roles.learner import RunLearner
from rl_async_trainer.settings import AsyncSettings
from rl_core.cluster import ClusterOptions, Incarnation, RoleSpec, open_cluster
from rl_core.errors import NotReadyError
from rl_core.weights.broadcast import BroadcastTransport, SourceGroups, WeightSources
from rl_distill.learners import Learners


class Host(RunLearner):
    """A learner host without a policy; its transport exists from the start."""

    opened: BroadcastTransport

    def __init__(self) -> None:
        """Start nothing."""
        nothing: Any = None
        self.learners = Learners(policy=nothing, reference=None, critic=None, close=lambda: None)

    async def start(self, checkpoint: Path | None) -> int:
        """Open the transport for one engine."""
        self.transport = Host.opened = BroadcastTransport(num_receivers=1)
        return 0

    async def close(self) -> None:
        """Close the transport."""
        Host.opened.close()


class Rollouter:
    """Accepts any number of engines."""

    async def set_num_engines(self, count: int) -> int:
        """Return the requested number."""
        return count


class Parts:
    """The parts of the controller that `answer_request` uses."""

    settings = AsyncSettings(policy={"path": "p"}, prompts={"train": "t"})  # type: ignore[arg-type]

    lifecycle = SimpleNamespace(say=lambda event, **fields: None)


def is_open(transport: BroadcastTransport, *, expected: bool) -> bool:
    """Wait until the port is open or closed as expected, for at most a minute."""
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at:
        try:
            socket.create_connection(("127.0.0.1", transport._listener.port), timeout=60).close()
            found = True
        except (ConnectionRefusedError, ConnectionResetError):  # closed before or during the connection
            found = False
        if found == expected:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("count", [0, 2])
def test_a_learner_listens_for_the_engines_that_scale_adds(count: int) -> None:
    async def scaled() -> None:
        spec = RoleSpec(name="learner", factory=f"{__name__}:Host")
        role = await open_cluster(ClusterOptions(kind="inline")).start(spec, deadline_s=60)
        link = LearnerLink(role, find_checkpoint=lambda: None, on_lost=nothing, on_restored=nothing)
        await link.start()
        first = Host.opened
        update = first.pack({"a": torch.ones(1)}, version=1, tied={})
        groups = SourceGroups(rank=1, num_workers=1, device=torch.device("cpu"))
        WeightSources(lambda plan: [groups.ask(plan)]).announce(update)
        assert is_open(first, expected=False)
        await answer_request(Parts(), link, Rollouter(), {"do": "scale", "engines": count})  # type: ignore[arg-type]
        assert is_open(first, expected=count == 2)
        await link._begin(Incarnation(1, None, role.call))  # as after a death
        assert Host.opened._num_receivers == (count or 1)
        groups.close()
        first.close()
        await role.close()

    asyncio.run(scaled())


async def nothing(_: object) -> None:
    """Do nothing."""


def test_more_engines_than_there_are_cpus_are_refused_before_anything_is_told_of_them() -> None:
    class Unasked:
        """Fails the test if the learner or the rollouter is called."""

    class Processes(Parts):
        settings = AsyncSettings(policy={"path": "p"}, prompts={"train": "t"}, rollout={"placement": "process"})

    cpus = len(os.sched_getaffinity(0))
    request = {"do": "scale", "engines": cpus + 7}
    says = f"{cpus + 7} engines need 1 CPU and 0 GPUs each; this machine has {cpus} CPU.*: room for {cpus}. Request at"
    with pytest.raises(NotReadyError, match=says):
        asyncio.run(answer_request(Processes(), Unasked(), Unasked(), request))  # type: ignore[arg-type]
