"""A running role: the callers' handle across successive incarnations."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rl_core.cluster.calls import RoleCall, describe_call
from rl_core.cluster.messages import named
from rl_core.cluster.pools import Slot
from rl_core.cluster.role_process import Launcher, LaunchRequest, RoleProcess
from rl_core.cluster.role_spec import RoleContext, RoleSpec
from rl_core.cluster.stacks import NOT_KNOWN
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleDiedError

State = Literal["starting", "serving", "restarting", "dead", "closed"]
DeathCallback = Callable[["Role", RLError], None]
NEWS_DEADLINE_S = 60.0


class Methods:
    """The methods of a role's object, as coroutine functions that call it.

    Annotate a variable with the object's class, so that mypy checks the calls: `learner: Learner = role.methods()`.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        """Set the function that calls a method: `call(name, *args, **kwargs)`."""
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a method."""
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is not a method of a role")
        return partial(self._call, name)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One run of a role, which no other caller can use until it is set up.

    Attributes:
        number: 1 for the first; each restart adds one.
        death: How the run before it ended; None for the first.
        call: Calls a method; see `Role.call`.
    """

    number: int
    death: RLError | None
    call: Callable[..., Awaitable[Any]]

    def methods(self) -> Any:
        """Return the methods of its object; see `Methods`."""
        return Methods(self.call)


SetUp = Callable[[Incarnation], Awaitable[None]]
"""Brings a new run of a role to the state in which it can serve, such as an engine with the current weights."""


class Role:
    """A running role, for use on the event loop that started it; created by `Cluster.start` and `RoleGroup`.

    Attributes:
        spec: Specification of the role.
        incarnation: Starts at 1 and increases by one with each restart.
        state: One of starting, serving, restarting, dead (permanently) or closed.
    """

    def __init__(self, spec: RoleSpec, *, size: int, slot: Slot | None, launcher: Launcher) -> None:
        """Initialize without starting."""
        self.spec = spec
        self.incarnation = 0
        self.state: State = "starting"
        self._size = size
        self._slot = slot
        self._launcher = launcher
        self._current: RoleProcess | None = None
        self._changed = asyncio.Event()
        self._fate = ""
        self._ending: BaseException | None = None
        self._callbacks: list[DeathCallback] = []
        self._last_death: RLError | None = None
        self._set_up: SetUp | None = None
        self.decide_restart: DeathCallback | None = None
        """Decides about restarts; called before others are notified of the death."""

    @property
    def rank(self) -> int:
        """Rank among equal roles."""
        return self.spec.rank

    @property
    def pid(self) -> int:
        """Process id, on its own host.

        Raises:
            NotReadyError: It has no process because it is restarting or closed.
        """
        if self._current is None:
            raise NotReadyError(f"{self.spec} has no process: it is {self.state}.")
        return self._current.pid

    @property
    def death(self) -> RLError | None:
        """The error of its calls once it is permanently dead."""
        return self._death() if self.state == "dead" else None

    @property
    def is_alive(self) -> bool:
        """False while it restarts, and once it is closed or permanently dead."""
        return self.state == "serving" and self._current is not None and self._current.is_alive

    def methods(self, *, deadline_s: float | None = None) -> Any:
        """Return the methods of its object, to be called as in `call`; see `Methods`."""
        return Methods(partial(self.call, deadline_s=deadline_s))

    async def set_up(self, work: SetUp) -> None:
        """Set the role up, now and after each restart before it serves calls. A death meanwhile is such a restart.

        Raises:
            RoleDiedError: It died, and is not restarted.
            Exception: The error of `work`; after a restart, its calls raise RoleDiedError with it.
        """
        while self.state == "restarting":
            await self.changed()
        current, number, self._set_up = await self._serving(), self.incarnation, work
        try:
            await work(self.begun(current))
        except RoleDiedError as error:
            if error.role not in (None, self.spec.name):
                raise  # another role's death, passed on by this one
            await self.outlive(number, error)

    async def outlive(self, number: int, error: Exception) -> int:
        """Wait for the restart of a run that a call found dead; return the number of the new one.

        Args:
            number: Number of the run that died.
            error: The call's error.

        Raises:
            RoleDiedError: The role is not restarted.
            DeadlineError: The death was not noticed in time.
        """
        try:
            async with asyncio.timeout(NEWS_DEADLINE_S):
                while (
                    self.state == "serving" and self.incarnation == number
                ):  # a call can fail before the state changes
                    await self.changed()
        except TimeoutError:
            raise DeadlineError(f"{self.spec} did not answer, as if dead, but is still running: {error}") from error
        while self.state == "restarting":  # bounded: restarts are limited in number and time
            await self.changed()
        if self.state in ("dead", "closed"):
            raise self.death or error
        return self.incarnation

    async def call(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call a sync or async method; calls may overlap. Arguments must not change until it returns.

        A new call waits while the role restarts.

        Args:
            method: Name of the method.
            *args: Positional arguments; numpy arrays arrive read-only on Ray.
            deadline_s: Maximum wait; None has no limit. The role continues a call after its caller gave up.
            **kwargs: Keyword arguments.

        Raises:
            RoleDiedError: The role died or restarted before it answered; the message explains how.
            DeadlineError: The call exceeded the deadline; the message includes the role's last message.
            NotReadyError: The role was closed.
            SettingsError: The object has no such method.
            RoleError: An argument or the result cannot be pickled.
            Exception: Whatever the method raised, with the remote traceback as a note and attributes `role` and `rank`.
        """
        parcel = self._launcher.pack(RoleCall([self.spec], method, args, kwargs))
        return await self.send(method, parcel, deadline_s=deadline_s)

    async def send(self, method: str, parcel: Any, *, deadline_s: float | None) -> Any:
        """Call a method with arguments packed by the launcher."""
        began_at = time.time()
        limit = asyncio.timeout(deadline_s)
        current: RoleProcess | None = None
        try:
            async with limit:
                current = await self._serving()
                return await current.call(method, parcel)
        except RoleDiedError as error:
            if current is None or error.role != self.spec.name or error.rank != self.spec.rank:
                raise
            raise RoleDiedError(f"{error} {self._fate}", role=error.role, rank=error.rank) from None
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late(method, current, began_at, deadline_s or 0.0) from None

    async def changed(self) -> None:
        """Wait for the next change of its state."""
        await self._changed.wait()

    async def stacks(self, *, deadline_s: float) -> str:
        """Return its current calls, the Python stacks of its threads, and where its event loop's tasks wait.

        Its process answers even if its event loop or main thread is blocked. If C code holds the GIL, a signal handler
        writes the stacks, without the tasks. Nothing is raised: the text explains missing stacks.

        Args:
            deadline_s: Maximum wait.
        """
        current = self._current
        if self.state in ("dead", "closed") or current is None:
            because = self._death() if self.state == "dead" else f"{self.spec} is {self.state}. {self._fate}"
            return f"{because}".rstrip()
        heading = (
            f"{self.spec} is {self.state} in pid {current.pid}; pending calls: {current.under_way}; its last "
            f"message was {current.last_heard}."
        )
        try:
            return f"{heading}\n{await current.stacks(deadline_s)}"
        except Exception as error:  # it died meanwhile; hang diagnosis must not fail
            return f"{heading}\n{NOT_KNOWN}: {type(error).__name__}: {error}"

    def on_death(self, callback: DeathCallback) -> None:
        """Register a callback for each death, before any restart; runs on its event loop."""
        self._callbacks.append(callback)

    async def fail(self, because: str) -> None:
        """Kill its process and treat it as dead: its policy decides about a restart.

        Args:
            because: End of a sentence about the role, such as "did not answer for 60 s and was killed".
        """
        current = self._current
        if current is None or self.state != "serving":
            return
        self._has_died(current, named(RoleDiedError(f"{self.spec} {because}."), self.spec))
        await current.kill(because)

    async def close(self) -> None:
        """Call the object's `close`, if defined, and end its process with its children. Idempotent."""
        current = self._current
        self._set("closed")
        try:
            if current is not None:
                await current.close()
        finally:
            self.give_slot_back()

    # -- for its supervisor

    async def launch(self, deadline_s: float) -> None:
        """Start the next incarnation, which does not serve calls yet."""
        self.incarnation += 1
        context = RoleContext(
            name=self.spec.name, rank=self.spec.rank, size=self._size, address="", incarnation=self.incarnation
        )
        request = LaunchRequest(spec=self.spec, context=context, slot=self._slot, deadline_s=round(deadline_s, 1))
        current = await self._launcher.launch(request)
        if self.state == "closed":
            await current.kill("was closed while it started")
            return
        self._current = current
        loop = asyncio.get_running_loop()

        def died(error: RLError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._has_died, current, error)

        current.watch(died)

    async def end(self, because: str) -> None:
        """Kill the current incarnation, if any."""
        current, self._current = self._current, None
        if current is not None:
            await current.kill(because)

    async def set_up_again(self) -> None:
        """Set a restarted role up."""
        if self._set_up is not None and self._current is not None:
            await self._set_up(self.begun(self._current))

    def begun(self, current: RoleProcess) -> Incarnation:
        """Return the argument of `set_up`'s work."""

        async def call(method: str, /, *args: Any, **kwargs: Any) -> Any:
            return await current.call(method, self._launcher.pack(RoleCall([self.spec], method, args, kwargs)))

        return Incarnation(self.incarnation, self._last_death, call)

    def serve(self) -> None:
        """Start to serve calls."""
        if self.state != "closed":
            self._set("serving")

    def check_alive(self) -> None:
        """Refuse to continue with a dead incarnation.

        Raises:
            RoleDiedError: The incarnation died.
        """
        if self._current is None or not self._current.is_alive:
            raise named(RoleDiedError(f"{self.spec} died right after its restart."), self.spec)

    def hold(self, fate: str) -> None:
        """Block calls; waiting ones fail with the role's outcome."""
        if self.state != "closed":
            self._fate = fate
            self._set("restarting")

    def give_up(self, ending: BaseException, fate: str) -> None:
        """Mark the role as permanently dead."""
        if self.state != "closed":
            self._ending, self._fate = ending, fate
            self._set("dead")
            self.give_slot_back()

    def give_slot_back(self) -> None:
        """Return its slot to the pool."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._launcher.pools.give_back(slot)

    # -- inside

    def _has_died(self, current: RoleProcess, error: RLError) -> None:
        if current is not self._current or self.state == "closed":
            return
        self._last_death = error
        if self.decide_restart is not None:
            self.decide_restart(self, error)
        for callback in list(self._callbacks):
            callback(self, error)

    async def _serving(self) -> RoleProcess:
        while self.state in ("starting", "restarting"):
            await self._changed.wait()
        if self.state == "closed":
            raise self._closed()
        if self.state == "dead" or self._current is None:
            raise self._death()
        return self._current

    def _closed(self) -> RLError:
        return NotReadyError(f"{self.spec} was closed; start it again before calling it.")

    def _death(self) -> RLError:
        error = named(RoleDiedError(f"{self.spec} is dead: {self._ending} {self._fate}".rstrip()), self.spec)
        error.__cause__ = self._ending
        return error

    def _late(self, method: str, current: RoleProcess | None, began_at: float, deadline_s: float) -> RLError:
        since = time.strftime("%H:%M:%S", time.localtime(began_at))
        if current is None:
            news = f"it was being restarted. {self._fate}"
        else:
            news = f"its last message was {current.last_heard}. It continues; its answer is dropped."
        text = f"{self.spec} did not answer {describe_call(method)} within {deadline_s:g} s (called at {since}); {news}"
        return named(DeadlineError(text), self.spec)

    def _set(self, state: State) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def within(deadline_s: float, message: str) -> AsyncIterator[None]:
    """Cancel a block that takes too long; a TimeoutError of the block itself, which is more specific, is kept.

    Args:
        deadline_s: Maximum time.
        message: Message of the error.

    Raises:
        DeadlineError: The block took longer.
    """
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(message) from error
