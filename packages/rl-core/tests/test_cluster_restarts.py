"""Supervised roles restart once per death, and calls wait for the restart."""

import asyncio
import os
import signal
from typing import Any

import pytest

from rl_core.cluster import ClusterOptions, Incarnation, Methods, RestartPolicy, Role, RoleSpec, open_cluster
from rl_core.cluster.restarts import RoleRestartedError, SupervisedRole
from rl_core.errors import RoleDiedError

DEADLINE_S = 60.0


class Worker:
    """A role object that must be started before its `pid` can be called."""

    def __init__(self) -> None:
        self.is_started = False

    async def start(self) -> None:
        self.is_started = True

    async def pid(self) -> int:
        assert self.is_started
        return os.getpid()

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def supervise(use: Any, *, max_restarts: int, deaths_in_set_up: int = 0) -> list[str]:
    """Use a supervised role in a separate process; return the deaths and starts in order."""
    happened: list[str] = []

    async def work() -> None:
        async with open_cluster(ClusterOptions(kind="process")) as cluster:
            restart = RestartPolicy(max_restarts=max_restarts, backoff_s=0.01)
            spec = RoleSpec(name="worker", factory=f"{__name__}:Worker", restart=restart)
            role: Role = await cluster.start(spec, deadline_s=DEADLINE_S)

            async def set_up(new: Incarnation) -> None:
                happened.append("start" if new.death is None else "death and start")
                worker: Worker = new.methods()
                if len(happened) <= deaths_in_set_up:
                    await worker.die()
                await worker.start()

            await role.set_up(set_up)
            await asyncio.wait_for(use(SupervisedRole(role)), DEADLINE_S)

    asyncio.run(work())
    return happened


@pytest.mark.one_python("when to start a role again is arithmetic; test_cluster_process.py kills roles")
@pytest.mark.parametrize("deaths_in_set_up", [0, 1, 2])
def test_a_death_is_healed_once_and_everybody_who_called_is_told(deaths_in_set_up: int) -> None:
    async def use(role: SupervisedRole) -> None:
        worker: Worker = role.methods()
        first = await worker.pid()
        ended = await asyncio.gather(*(worker.die() for _ in range(3)), return_exceptions=True)
        assert ended
        assert all(isinstance(error, RoleRestartedError) for error in ended)
        assert await worker.pid() != first
        with pytest.raises(RoleRestartedError):
            await role.methods(incarnation=1).pid()

    happened = supervise(use, max_restarts=3, deaths_in_set_up=deaths_in_set_up)
    assert happened == ["start", *(["death and start"] * (1 + deaths_in_set_up))]


@pytest.mark.one_python("when to start a role again is arithmetic; test_cluster_process.py kills roles")
def test_a_role_that_may_not_be_started_again_raises_its_death() -> None:
    async def use(role: SupervisedRole) -> None:
        for _ in range(2):
            with pytest.raises(RoleDiedError, match=r"SIGKILL"):
                await role.methods().die()

    assert supervise(use, max_restarts=0) == ["start"]


def test_only_public_methods_are_remote() -> None:
    with pytest.raises(AttributeError, match="'_private' is not a method of a role"):
        Methods(asyncio.sleep)._private  # noqa: B018


@pytest.mark.one_python("when to start a role again is arithmetic; test_cluster_process.py kills roles")
def test_a_role_that_is_not_set_up_in_time_after_its_restart_says_so() -> None:
    async def set_up(new: Incarnation) -> None:
        if new.death is not None:
            await asyncio.Event().wait()

    async def work() -> None:
        async with open_cluster(ClusterOptions(kind="inline")) as cluster:
            spec = RoleSpec(name="worker", factory=f"{__name__}:Worker", restart=RestartPolicy(max_restarts=1))
            group = await cluster.start_group(spec, size=1, deadline_s=0.2)
            role = group[0]
            await role.set_up(set_up)
            await role.fail("was ended by the test")
            worker: Worker = role.methods()
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(RoleDiedError, match=r"'worker' was not set up within 0\.2 s after its restart"):
                    await worker.pid()

    asyncio.run(work())
