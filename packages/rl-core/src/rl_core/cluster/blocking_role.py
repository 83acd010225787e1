"""One role for code that is not async; and the thread in which roles of such code live."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.running_role import Role, State
from rl_core.cluster.stacks import process_stacks
from rl_core.errors import DeadlineError, NotReadyError, RLError

SPARE_S = 1.0
"""What the roles' thread may take beside the time that a role is given."""
Result = TypeVar("Result")


class RoleThread:
    """A thread with an event loop, where roles live; others wait for what runs in it."""

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="roles", daemon=True)
        self._thread.start()

    @property
    def is_ended(self) -> bool:
        """True once it was ended."""
        return self._loop.is_closed()

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something in the roles' thread; broken off with the caller's wait.

        Raises:
            NotReadyError: The group is closed, or this is its own thread.
        """
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            raise NotReadyError("the group of roles is closed, or waits for itself; start another one.")
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

    def stacks(self, asked: Coroutine[Any, Any, Result], *, deadline_s: float) -> Result | str:
        """Ask for stacks in the roles' thread; where that thread is blocked, what this process does; never raises."""
        closed = "The group of roles is closed, or asks itself."
        if threading.current_thread() is self._thread:
            asked.close()
            return closed
        try:
            answer = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # it is closed
            asked.close()
            return closed
        longest_s = deadline_s + SPARE_S
        try:
            return answer.result(longest_s)
        except TimeoutError:
            answer.cancel()
            return (
                f"The thread that calls the roles has not answered for {longest_s:.1f} s. This process does this:\n"
                f"{process_stacks()}"
            )

    def wait_death(self, of: str, death: Coroutine[Any, Any, RLError], deadline_s: float | None) -> RLError:
        """Wait for a death.

        Raises:
            DeadlineError: There was none in time.
        """

        async def limited() -> RLError:
            limit = asyncio.timeout(deadline_s)
            try:
                async with limit:
                    return await death
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineError(f"{of} did not die within {deadline_s:g} s; wait longer, or go on.") from None

        return self.wait(limited())

    def end(self) -> None:
        """Stop the event loop, and wait for the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingRole:
    """A `Role` whose methods wait; `BlockingGroup` gives it."""

    def __init__(self, role: Role, thread: RoleThread) -> None:
        """This role lives in that thread."""
        self._role = role
        self._thread = thread

    @property
    def spec(self) -> RoleSpec:
        """What it was made from."""
        return self._role.spec

    @property
    def rank(self) -> int:
        """Which of several equal roles."""
        return self._role.rank

    @property
    def incarnation(self) -> int:
        """1, and one more for each restart."""
        return self._role.incarnation

    @property
    def pid(self) -> int:
        """See `Role.pid`."""
        return self._role.pid

    @property
    def state(self) -> State:
        """See `Role.state`."""
        return self._role.state

    @property
    def is_alive(self) -> bool:
        """See `Role.is_alive`."""
        return self._role.is_alive

    def call(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method; see `Role.call`."""
        return self._thread.wait(self._role.call(method, *args, deadline_s=deadline_s, **kwargs))

    def stacks(self, *, deadline_s: float) -> str:
        """See `Role.stacks`; for any thread, also while another one waits for a call."""
        return self._thread.stacks(self._role.stacks(deadline_s=deadline_s), deadline_s=deadline_s)

    def wait_death(self, *, deadline_s: float | None = None) -> RLError:
        """Wait until it dies; see `Role.wait_death`.

        Raises:
            DeadlineError: It did not in time.
        """
        return self._thread.wait_death(str(self.spec), self._role.wait_death(), deadline_s)


def _pass_on(ended: "asyncio.Task[Result]", done: "Future[Result]") -> None:
    if ended.cancelled():
        done.set_exception(NotReadyError("the call was broken off."))
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())
