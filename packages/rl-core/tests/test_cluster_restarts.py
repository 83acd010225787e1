"""Supervised roles restart once per death, and calls wait for the restart."""

import asyncio
import os
import signal
from typing import Any

import pytest

from rl_core.cluster import ClusterOptions, RestartPolicy, Role, RoleSpec, open_cluster
from rl_core.cluster.restarts import RoleRestartedError, SupervisedRole
from rl_core.errors import RoleDiedError

DEADLINE_S = 60.0


class Worker:
    """A role object that must be started before its `pid` can be called."""

    def __init__(self) -> None:
        self.is_started = False

    def start(self) -> None:
        self.is_started = True

    def pid(self) -> int:
        assert self.is_started
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def supervise(use: Any, *, max_restarts: int, deaths_in_start: int = 0) -> tuple[list[str], SupervisedRole]:
    """Use a supervised role in a separate process; return the losses and starts in order, and the role."""
    happened: list[str] = []

    async def work() -> SupervisedRole:
        async with open_cluster(ClusterOptions(kind="process")) as cluster:
            restart = RestartPolicy(max_restarts=max_restarts, backoff_s=0.01)
            spec = RoleSpec(name="worker", factory=f"{__name__}:Worker", restart=restart)
            role: Role = await cluster.start(spec, deadline_s=DEADLINE_S)

            async def lost(error: RoleDiedError) -> None:
                happened.append("lost")

            async def start() -> None:
                happened.append("start")
                if happened.count("start") <= deaths_in_start:
                    await role.call("die")
                await role.call("start")

            await role.call("start")
            supervised = SupervisedRole(role, on_lost=lost, start=start)
            await asyncio.wait_for(use(supervised), DEADLINE_S)
            return supervised

    return happened, asyncio.run(work())


@pytest.mark.one_python("when to start a role again is arithmetic; test_cluster_process.py kills roles")
@pytest.mark.parametrize("deaths_in_start", [0, 1])
def test_a_death_is_healed_once_and_everybody_who_called_is_told(deaths_in_start: int) -> None:
    async def use(role: SupervisedRole) -> None:
        first = await role.call("pid")
        ended = await asyncio.gather(*(role.call("die") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, RoleRestartedError) for error in ended)
        assert await role.call("pid") != first
        with pytest.raises(RoleRestartedError):
            await role.call("pid", incarnation=1)

    happened, role = supervise(use, max_restarts=3, deaths_in_start=deaths_in_start)
    assert happened == ["lost", "start"] * (1 + deaths_in_start)
    assert role.num_restarts == 1 + deaths_in_start


@pytest.mark.one_python("when to start a role again is arithmetic; test_cluster_process.py kills roles")
def test_a_role_that_may_not_be_started_again_raises_its_death() -> None:
    async def use(role: SupervisedRole) -> None:
        for _ in range(2):
            with pytest.raises(RoleDiedError, match=r"SIGKILL"):
                await role.call("die")

    happened, role = supervise(use, max_restarts=0)
    assert happened == []
    assert role.num_restarts == 0
