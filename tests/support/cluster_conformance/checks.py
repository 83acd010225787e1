"""The base of all checks of a cluster."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rl_core.cluster import Cluster, ClusterOptions, Role, RoleGroup, RoleSpec, open_cluster
from rl_core.cluster.processes.guard import is_running
from rl_core.errors import RLError
from rl_core.testing.fixtures import wait_until

Result = TypeVar("Result")

ECHO = "cluster_conformance.role:EchoRole"
START_S = 120.0
"""Deadline for expected events, long enough for a busy machine."""
NOTICED_S = 60.0
"""Deadline for noticing a death anywhere."""


class ClusterChecks:
    """Provides a group of three roles for checks that leave it unchanged, and separate clusters for the others."""

    shared: Cluster
    group: RoleGroup
    _loop: asyncio.AbstractEventLoop
    _folder: "tempfile.TemporaryDirectory[str]"

    @classmethod
    def make_options(cls, **changes: Any) -> ClusterOptions:
        """Return the options of the tested cluster; the only method that a placement's test class must define."""
        raise NotImplementedError

    @classmethod
    def setup_class(cls) -> None:
        """Start the shared group before the first check."""
        cls._loop = asyncio.new_event_loop()
        cls._folder = tempfile.TemporaryDirectory(prefix="cluster-checks-")
        cls.shared = open_cluster(cls.make_options())
        cls.group = cls._loop.run_until_complete(cls.shared.start_group(echo(), size=3, deadline_s=START_S))

    @classmethod
    def teardown_class(cls) -> None:
        """Close the shared group after the last check, and check that its processes have ended."""
        pids = [role.pid for role in cls.group]
        cls._loop.run_until_complete(cls.shared.close())
        cls._loop.close()
        cls._folder.cleanup()
        if cls.make_options().kind != "inline":
            assert not any(is_running(pid) for pid in pids), "processes of closed roles are left"

    def setup_method(self) -> None:
        """Create a folder for each check."""
        self.folder = Path(tempfile.mkdtemp(dir=self._folder.name))

    def run(self, work: Awaitable[Result], *, deadline_s: float = START_S) -> Result:
        """Run something on the event loop of the shared group."""
        return self._loop.run_until_complete(asyncio.wait_for(work, deadline_s))

    def with_cluster(self, use: Callable[[Cluster], Awaitable[Result]], **changes: Any) -> Result:
        """Run something with a separate cluster, and close it afterwards."""

        async def run() -> Result:
            async with open_cluster(self.make_options(**changes)) as cluster:
                return await asyncio.wait_for(use(cluster), START_S)

        return asyncio.run(run())


def echo(**changes: Any) -> RoleSpec:
    """Return the spec of an echo role; changes without a field in the spec become the factory's arguments."""
    known = {"name", "factory", "rank", "environment", "cpus", "gpus", "restart"} & set(changes)
    fields = {name: changes.pop(name) for name in known}
    return RoleSpec(**{"name": "echo", "factory": ECHO, **fields}, kwargs=changes)


async def death_of(*roles: Role) -> RLError:
    """Wait until one of these roles dies; return the error of its death."""
    died: asyncio.Future[RLError] = asyncio.get_running_loop().create_future()
    for role in roles:
        role.on_death(lambda _, error: None if died.done() else died.set_result(error))
    return await died


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Check that the block takes no longer than the limit."""
    began_at = time.monotonic()
    yield
    took_s = time.monotonic() - began_at
    assert took_s <= limit_s, f"it took {took_s:.1f} s; expected {limit_s:g} s at most"


@contextmanager
def catches(kind: type[BaseException]) -> Iterator[list[Any]]:
    """Check that the block raises an error, and yield a list that receives it."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"expected {kind.__name__}; nothing was raised"


async def until(condition: Callable[[], bool], what: str, *, deadline_s: float = 20.0) -> None:
    """Wait for a condition without blocking the event loop."""
    await asyncio.to_thread(wait_until, condition, what, deadline_s=deadline_s)
