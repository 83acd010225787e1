"""A group of equal roles, which are started, called and restarted together or individually."""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rl_core.cluster.calls import RoleCall
from rl_core.cluster.pools import Slot
from rl_core.cluster.role_process import Launcher
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.running_role import DeathCallback, Role, within
from rl_core.errors import RLError, RoleDiedError, SettingsError

MAX_BACKOFF_S = 60.0
DEATH_TOLD_S = 10.0
"""Maximum delay before an ended process is reported, because its descendants are ended first."""


class RoleGroup:
    """Equal roles with ranks 0 to size - 1; for use on the event loop that started it.

    Attributes:
        spec: Specification of its roles.
    """

    def __init__(self, spec: RoleSpec, *, size: int, slots: Sequence[Slot | None], launcher: Launcher) -> None:
        """Initialize without starting; use `Cluster.start_group`."""
        self.spec = spec
        self._launcher = launcher
        ranks = [spec.rank] if size == 1 else range(size)
        specs = [replace(spec, rank=rank) for rank in ranks]
        self._roles = [
            Role(spec, size=size, slot=slot, launcher=launcher) for spec, slot in zip(specs, slots, strict=True)
        ]
        self._budgets = {id(role): _Budget(spec) for role in self._roles}
        self._group_budget = _Budget(spec)
        self._deadline_s = 0.0
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_group_restarting = False

    async def start(self, left_s: float, *, deadline_s: float) -> None:
        """Make every role's object within the remaining time, or end all if one fails. Each restart has the full time.

        A process that dies during the start counts as a death: all are restarted, as often as the policy allows.
        """
        self._deadline_s = deadline_s
        ends_at = time.monotonic() + left_s
        try:
            while True:
                try:
                    await self._launch(self._roles, max(ends_at - time.monotonic(), 0.0))
                    break
                except RoleDiedError:
                    pause_s = self._group_budget.next_pause_s()
                    if pause_s is None or time.monotonic() + pause_s >= ends_at:
                        raise
                    await asyncio.sleep(pause_s)
        except BaseException:
            await self.close()
            raise
        for role in self._roles:
            role.decide_restart = self._decide_restart
            role.serve()

    @property
    def size(self) -> int:
        """Number of roles."""
        return len(self._roles)

    @property
    def is_alive(self) -> bool:
        """True while every role is alive."""
        return all(role.is_alive for role in self._roles)

    def __getitem__(self, rank: int) -> Role:
        """Return the role of a rank.

        Raises:
            SettingsError: The rank does not exist.
        """
        if not 0 <= rank < self.size:
            raise SettingsError(f"role {self.spec.name!r} has ranks 0 to {self.size - 1}; found {rank}.")
        return self._roles[rank]

    def __repr__(self) -> str:
        return f"RoleGroup({len(self)} of {self.spec.name})"

    def __iter__(self) -> Iterator[Role]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)

    async def call(self, rank: int, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call one role; see `Role.call`.

        Raises:
            SettingsError: The rank does not exist.
        """
        return await self[rank].call(method, *args, deadline_s=deadline_s, **kwargs)

    async def call_all(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call all roles with the same arguments, which are packed and stored once.

        If a role raises, dies or exceeds the deadline, this raises its error at once without waiting for the others,
        which may hang in a collective: close the group, or use a policy that restarts it as a whole. If several fail
        together, as peers of a killed rank do, this raises the dead role's error with the others as notes.

        Returns:
            Results in rank order.

        Raises:
            Exception: See `Role.call`.
        """
        parcel = self._launcher.pack(RoleCall([role.spec for role in self._roles], method, args, kwargs))
        return await self._together([role.send(method, parcel, deadline_s=deadline_s) for role in self._roles])

    async def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline_s: float | None = None
    ) -> list[Any]:
        """Call all roles, each with its own arguments; otherwise like `call_all`.

        Raises:
            SettingsError: The number of tuples differs from the number of roles.
        """
        if len(arguments) != self.size:
            raise SettingsError(
                f"{method!r} needs one tuple of arguments for each of the {self.size} roles {self.spec.name!r}; found "
                f"{len(arguments)}."
            )
        calls = zip(self._roles, arguments, strict=True)
        return await self._together([role.call(method, *one, deadline_s=deadline_s) for role, one in calls])

    async def stacks(self, *, deadline_s: float) -> list[str]:
        """Return the current stacks of each role in rank order, including dead ones; see `Role.stacks`."""
        return await asyncio.gather(*(role.stacks(deadline_s=deadline_s) for role in self._roles))

    def on_death(self, callback: DeathCallback) -> None:
        """Register a callback for each death of a role, before any restart; runs on the group's event loop."""
        for role in self._roles:
            role.on_death(callback)

    async def close(self) -> None:
        """Close every role, then raise the first error. Idempotent."""
        restarts = list(self._restarts)
        for restart in restarts:
            restart.cancel()
        closing = [asyncio.ensure_future(role.close()) for role in reversed(self._roles)]
        results = await asyncio.gather(*restarts, *closing, return_exceptions=True)
        for result in results[len(restarts) :]:
            if isinstance(result, BaseException):
                raise result

    # -- inside

    async def _together(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        tasks = [asyncio.ensure_future(call) for call in calls]
        failed: list[asyncio.Task[Any]] = []

        def note(task: "asyncio.Task[Any]") -> None:
            if not task.cancelled() and task.exception() is not None:
                failed.append(task)

        for task in tasks:
            task.add_done_callback(note)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if not any(task.done() and task.exception() for task in tasks):
                return [task.result() for task in tasks]
            await _settle(tasks, self._launcher.settle_s)
            if not self.is_alive:  # a pending death may explain the other failures
                await _settle(tasks, DEATH_TOLD_S)
        finally:
            await _drop(tasks)
        errors = [error for task in failed if (error := task.exception()) is not None]
        raise _root_of(errors)

    async def _launch(self, roles: Sequence[Role], deadline_s: float) -> None:
        """Start roles together; end all if one fails.

        Raises:
            Exception: The first failure.
        """
        launches = [asyncio.ensure_future(role.launch(deadline_s)) for role in roles]
        try:
            done, _ = await asyncio.wait(launches, return_when=asyncio.FIRST_EXCEPTION)
            for launch in done:
                launch.result()
        except BaseException:
            await _drop(launches)
            await asyncio.gather(*(role.end("was ended because another one could not start") for role in roles))
            raise

    def _decide_restart(self, role: Role, error: RLError) -> None:
        """Decide about restarts, before others are notified of the death."""
        policy = self.spec.restart
        if self._is_group_restarting or role.state == "restarting":
            return  # the restart in progress handles it
        unit, budget = [role], self._budgets[id(role)]
        if policy.scope == "group":
            unit, budget = self._roles, self._group_budget
        pause_s = budget.next_pause_s()
        if pause_s is None:
            role.give_up(error, budget.refusal())
            return
        whom = "It is" if len(unit) == 1 else f"All {len(unit)} of {self.spec.name!r} are"
        for one in unit:
            one.hold(f"{whom} being restarted ({budget.describe()}); call again.")
        self._is_group_restarting = policy.scope == "group"
        task = asyncio.get_running_loop().create_task(
            self._restart(unit, budget, pause_s, f"was ended because {error}")
        )
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, unit: Sequence[Role], budget: "_Budget", pause_s: float, because: str) -> None:
        try:
            while True:
                await asyncio.gather(*(role.end(because) for role in unit))
                await asyncio.sleep(pause_s)
                try:
                    await self._launch(unit, self._deadline_s)
                    late = f"{self.spec.name!r} was not set up within {self._deadline_s:g} s after its restart."
                    async with within(self._deadline_s, late):
                        await asyncio.gather(*(role.set_up_again() for role in unit))
                    for role in unit:
                        role.check_alive()
                except Exception as error:
                    pause = budget.next_pause_s()
                    if pause is None:
                        await asyncio.gather(*(role.end("was ended because its restart failed") for role in unit))
                        for role in unit:
                            role.give_up(error, budget.refusal())
                        return
                    pause_s, because = pause, f"was ended because {error}"
                    continue
                for role in unit:
                    role.serve()
                return
        finally:
            self._is_group_restarting = False


class _Budget:
    """Counts restarts against a policy."""

    def __init__(self, spec: RoleSpec) -> None:
        self._policy = spec.restart
        self._times: list[float] = []

    def next_pause_s(self) -> float | None:
        """Return the pause before the next restart; None if no restart is left."""
        policy, now = self._policy, time.monotonic()
        if policy.within_s is not None:
            self._times = [then for then in self._times if now - then <= policy.within_s]
        if len(self._times) >= policy.max_restarts:
            return None
        self._times.append(now)
        return float(min(policy.backoff_s * 2 ** (len(self._times) - 1), MAX_BACKOFF_S))

    def describe(self) -> str:
        """Describe the restart, such as "restart 1 of 3"."""
        return f"restart {len(self._times)} of {self._policy.max_restarts}"

    def refusal(self) -> str:
        """Explain why no further restart happens."""
        if not self._policy.max_restarts:
            return ""
        within = "" if self._policy.within_s is None else f" within {self._policy.within_s:g} s"
        times = f"{len(self._times)} time{'' if len(self._times) == 1 else 's'}"
        return f"It was restarted {times}{within}, the maximum."


async def _settle(tasks: Sequence["asyncio.Task[Any]"], limit_s: float) -> None:
    """After a failure, wait briefly for a death that may have caused it."""
    ends_at = time.monotonic() + limit_s
    waiting = {task for task in tasks if not task.done()}
    while waiting and not any(_is_death(task) for task in tasks):
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            return
        _, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def _is_death(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and isinstance(task.exception(), RoleDiedError)


def _root_of(errors: Sequence[BaseException]) -> BaseException:
    """Return the first death among the ranks' errors, else the first error, with the others as notes."""
    root = next((error for error in errors if isinstance(error, RoleDiedError)), errors[0])
    for error in errors:
        if error is not root:
            who = f"{getattr(error, 'role', 'another')}[{getattr(error, 'rank', '?')}]"
            root.add_note(f"{who} also failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return root


async def _drop(calls: Any) -> None:
    """Cancel calls and ignore their errors."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
