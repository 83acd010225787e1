"""A group of roles for synchronous code: calls block the caller, and the roles' event loop has its own thread."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_core.cluster.cluster import Cluster, open_cluster
from rl_core.cluster.group import RoleGroup
from rl_core.cluster.options import ClusterOptions, ResourcePool
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.stacks import process_stacks
from rl_core.errors import NotReadyError

SPARE_S = 1.0
"""Extra time for the roles' thread beyond a role's deadline."""
Result = TypeVar("Result")


class BlockingGroup:
    """A `RoleGroup` whose calls block; usable from any thread, including one with a running event loop.

    Ctrl-C interrupts a wait at once; an interrupted start leaves nothing behind.
    """

    def __init__(self) -> None:
        """Initialize without roles; use `start`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="roles", daemon=True)
        self._thread.start()
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
            self._group = self._wait(starting)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def size(self) -> int:
        """Number of roles."""
        return self._group.size

    @property
    def is_alive(self) -> bool:
        """True while every role is alive."""
        return self._group.is_alive

    def call(self, rank: int, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call one role; see `Role.call`."""
        return self._wait(self._group.call(rank, method, *args, deadline_s=deadline_s, **kwargs))

    def call_all(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call all roles with the same arguments; see `RoleGroup.call_all`."""
        return self._wait(self._group.call_all(method, *args, deadline_s=deadline_s, **kwargs))

    def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline_s: float | None = None
    ) -> list[Any]:
        """Call all roles, each with its own arguments; see `RoleGroup.call_each`."""
        return self._wait(self._group.call_each(method, arguments, deadline_s=deadline_s))

    def stacks(self, *, deadline_s: float) -> list[str]:
        """Return each role's current stacks; usable from any thread, also during a call. See `RoleGroup.stacks`.

        If the roles' thread is blocked, each text contains this process's stacks instead; nothing is raised.
        """
        closed = ["The group of roles is closed, or was called from its own thread."] * self.size
        if threading.current_thread() is self._thread:
            return closed
        stacks = self._group.stacks(deadline_s=deadline_s)
        try:
            answer = asyncio.run_coroutine_threadsafe(stacks, self._loop)
        except RuntimeError:  # the loop is closed
            stacks.close()
            return closed
        longest_s = deadline_s + SPARE_S
        try:
            return answer.result(longest_s)
        except TimeoutError:
            answer.cancel()
            text = (
                f"The thread that calls the roles has not answered for {longest_s:.1f} s. Stacks of this process:\n"
                f"{process_stacks()}"
            )
            return [text] * self.size

    def close(self) -> None:
        """End the roles and the cluster. Idempotent."""
        with self._close_lock:
            if self._loop.is_closed():
                return
            try:
                if self._cluster is not None:
                    self._wait(self._cluster.close())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the roles' thread; interrupting the caller cancels it.

        Raises:
            NotReadyError: The group is closed, or the caller is its own thread.
        """
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            raise NotReadyError("the group of roles is closed, or was called from its own thread; start another group.")
        done: Future[Result] = Future()
        task: list[asyncio.Task[Result]] = []

        def begin() -> None:
            task.append(self._loop.create_task(work))
            task[0].add_done_callback(lambda ended: _pass_on(ended, done))

        self._loop.call_soon_threadsafe(begin)
        try:
            return done.result()
        except BaseException:
            if not done.done():  # Ctrl-C
                self._loop.call_soon_threadsafe(lambda: task[0].cancel())
                done.exception()
            raise


def _pass_on(ended: "asyncio.Task[Result]", done: "Future[Result]") -> None:
    if ended.cancelled():
        done.set_exception(NotReadyError("the call was cancelled."))
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())
