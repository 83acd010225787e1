"""A group of roles for code that is not async: it waits in the caller's thread, and runs in one of its own."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rl_core.cluster.blocking_role import BlockingRole, RoleThread
from rl_core.cluster.cluster import Cluster, open_cluster
from rl_core.cluster.group import RoleGroup
from rl_core.cluster.options import ClusterOptions, ResourcePool
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.running_role import DeathCallback
from rl_core.errors import RLError


class BlockingGroup:
    """A `RoleGroup` whose methods wait; for any thread, also one whose event loop runs.

    Ctrl-C during a wait is raised at once; a start that it breaks off leaves nothing behind.
    """

    def __init__(self) -> None:
        """Use `start`."""
        self._thread = RoleThread()
        self._close_lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._group: RoleGroup

    @classmethod
    def start(
        cls,
        cluster_options: ClusterOptions,
        spec: RoleSpec,
        *,
        size: int,
        pool: ResourcePool | None = None,
        deadline_s: float,
    ) -> "BlockingGroup":
        """Open a cluster and start equal roles in it; see `Cluster.start_group`."""
        self = cls()
        try:
            self._cluster = open_cluster(cluster_options)
            starting = self._cluster.start_group(spec, size=size, pool=pool, deadline_s=deadline_s)
            self._group = self._thread.wait(starting)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def spec(self) -> RoleSpec:
        """What its roles were made from."""
        return self._group.spec

    @property
    def size(self) -> int:
        """Number of roles."""
        return self._group.size

    @property
    def is_alive(self) -> bool:
        """True while every role is."""
        return self._group.is_alive

    def __getitem__(self, rank: int) -> BlockingRole:
        """One of them; see `RoleGroup.__getitem__`."""
        return BlockingRole(self._group[rank], self._thread)

    def __iter__(self) -> Iterator[BlockingRole]:
        return (BlockingRole(role, self._thread) for role in self._group)

    def __len__(self) -> int:
        return self.size

    def call(self, rank: int, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call one; see `Role.call`."""
        return self._thread.wait(self._group.call(rank, method, *args, deadline_s=deadline_s, **kwargs))

    def call_all(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call all with the same arguments; see `RoleGroup.call_all`."""
        return self._thread.wait(self._group.call_all(method, *args, deadline_s=deadline_s, **kwargs))

    def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline_s: float | None = None
    ) -> list[Any]:
        """Call all, each with arguments of its own; see `RoleGroup.call_each`."""
        return self._thread.wait(self._group.call_each(method, arguments, deadline_s=deadline_s))

    def as_finished(
        self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any
    ) -> Iterator[tuple[int, Any]]:
        """Call all with the same arguments, and give (rank, result) as they come; see `RoleGroup.as_finished`.

        The calls begin when the first result is asked for. `deadline_s` bounds each of them, so that no wait is longer.
        """
        results = self._group.as_finished(method, *args, deadline_s=deadline_s, **kwargs)

        async def next_result() -> tuple[int, Any] | None:
            return await anext(results, None)

        try:
            while (result := self._thread.wait(next_result())) is not None:
                yield result
        finally:
            if not self._thread.is_ended:
                self._thread.wait(results.aclose())

    def stacks(self, *, deadline_s: float) -> list[str]:
        """What each does right now; for any thread, also while another one waits for a call. See `RoleGroup.stacks`."""
        found = self._thread.stacks(self._group.stacks(deadline_s=deadline_s), deadline_s=deadline_s)
        return [found] * self.size if isinstance(found, str) else found

    def on_death(self, callback: DeathCallback) -> None:
        """Have this called, in the roles' thread, each time a role dies, though it may be restarted."""

        async def add() -> None:
            self._group.on_death(callback)

        self._thread.wait(add())

    def wait_death(self, *, deadline_s: float | None = None) -> RLError:
        """Wait until a role dies; see `Role.wait_death`.

        Raises:
            DeadlineError: None did in time.
        """
        return self._thread.wait_death(f"any of role {self.spec.name!r}", self._group.wait_death(), deadline_s)

    def close(self) -> None:
        """End the roles, and the cluster. Can be called twice."""
        with self._close_lock:
            if self._thread.is_ended:
                return
            try:
                if self._cluster is not None:
                    self._thread.wait(self._cluster.close())
            finally:
                self._thread.end()
