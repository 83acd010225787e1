"""What every check of a cluster stands on."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rl_core.cluster import Cluster, ClusterOptions, RoleGroup, RoleSpec, open_cluster
from rl_core.cluster.processes.guard import is_running
from rl_core.testing.clock import wait_until

Result = TypeVar("Result")

ECHO = "cluster_conformance.role:EchoRole"
START_S = 120.0
"""Deadline for expected events, long enough for a busy machine."""
NOTICED_S = 60.0
"""Deadline for noticing a death anywhere."""


class ClusterChecks:
    """A group of three roles for all checks that leave it as it was, and clusters of their own for the others."""

    shared: Cluster
    group: RoleGroup
    _loop: asyncio.AbstractEventLoop
    _folder: "tempfile.TemporaryDirectory[str]"

    @classmethod
    def make_options(cls, **changes: Any) -> ClusterOptions:
        """The options of the cluster under test; the one method that a placement's test class writes."""
        raise NotImplementedError

    @classmethod
    def setup_class(cls) -> None:
        """Called by pytest before the first check."""
        cls._loop = asyncio.new_event_loop()
        cls._folder = tempfile.TemporaryDirectory(prefix="cluster-checks-")
        cls.shared = open_cluster(cls.make_options())
        cls.group = cls._loop.run_until_complete(cls.shared.start_group(echo(), size=3, deadline_s=START_S))

    @classmethod
    def teardown_class(cls) -> None:
        """Called by pytest after the last check."""
        pids = [role.pid for role in cls.group]
        cls._loop.run_until_complete(cls.shared.close())
        cls._loop.close()
        cls._folder.cleanup()
        if cls.make_options().kind != "inline":
            assert not any(is_running(pid) for pid in pids), "processes of closed roles are left"

    def setup_method(self) -> None:
        """Called by pytest before each check."""
        self.folder = Path(tempfile.mkdtemp(dir=self._folder.name))

    def run(self, work: Awaitable[Result], *, deadline_s: float = START_S) -> Result:
        """Run something on the event loop of the shared group."""
        return self._loop.run_until_complete(asyncio.wait_for(work, deadline_s))

    def with_cluster(self, use: Callable[[Cluster], Awaitable[Result]], **changes: Any) -> Result:
        """Run something with a cluster of its own, which is closed after it."""

        async def run() -> Result:
            async with open_cluster(self.make_options(**changes)) as cluster:
                return await asyncio.wait_for(use(cluster), START_S)

        return asyncio.run(run())


def echo(**changes: Any) -> RoleSpec:
    """The spec of an echo role; changes that the spec does not know are arguments of the factory."""
    known = {"name", "factory", "rank", "environment", "cpus", "gpus", "restart"} & set(changes)
    fields = {name: changes.pop(name) for name in known}
    return RoleSpec(**{"name": "echo", "factory": ECHO, **fields}, kwargs=changes)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Expect that something takes no longer."""
    began_at = time.monotonic()
    yield
    took_s = time.monotonic() - began_at
    assert took_s <= limit_s, f"it took {took_s:.1f} s; expected {limit_s:g} s at most"


@contextmanager
def catches(kind: type[BaseException]) -> Iterator[list[Any]]:
    """Expect an error, and give it in a list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"expected {kind.__name__}; nothing was raised"


async def until(condition: Callable[[], bool], what: str, *, deadline_s: float = 20.0) -> None:
    """Wait for a condition while the event loop goes on."""
    await asyncio.to_thread(wait_until, condition, what, deadline_s=deadline_s)
