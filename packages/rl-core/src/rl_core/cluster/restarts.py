"""Calls to a role that is restarted after its death, and whose work is then started again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rl_core.cluster.messages import named
from rl_core.cluster.running_role import Role
from rl_core.errors import DeadlineError, RoleDiedError

NEWS_DEADLINE_S = 60.0


class RoleRestartedError(Exception):
    """The role died before it answered and was restarted; the caller decides whether to repeat the call."""


class SupervisedRole:
    """Calls a role, and revives it once after each death while calls wait.

    Attributes:
        incarnation: The incarnation with the started work.
        num_restarts: Number of revivals.
    """

    def __init__(
        self,
        role: Role,
        *,
        on_lost: Callable[[RoleDiedError], Awaitable[None]],
        start: Callable[[], Awaitable[None]],
    ) -> None:
        """Supervise a role with a running process.

        Args:
            role: The role.
            on_lost: Called after each death, once the process runs again.
            start: Starts the work after `on_lost`; called again if the role dies during it.
        """
        self._role = role
        self._on_lost = on_lost
        self._start = start
        self._lock = asyncio.Lock()
        self.incarnation = role.incarnation
        self.num_restarts = 0

    @property
    def is_current(self) -> bool:
        """False from a restart of the process until its work is started again."""
        return self.incarnation == self._role.incarnation

    async def ready(self) -> int:
        """Wait until the role is revived; return the incarnation to call."""
        async with self._lock:
            return self.incarnation

    async def call(self, method: str, *args: Any, incarnation: int | None = None, **kwargs: Any) -> Any:
        """Call a method.

        Args:
            method: Name of the method.
            args: Positional arguments.
            incarnation: The incarnation to call; None means the current one.
            kwargs: Keyword arguments.

        Raises:
            RoleRestartedError: The role died and was revived.
            RoleDiedError: The role died and may not be restarted, or the call raised another role's death.
        """
        called = await self.ready() if incarnation is None else incarnation
        try:
            if not self._is_serving(called):
                raise self._role.death or named(RoleDiedError(f"{self._role.spec} died."), self._role.spec)
            return await self._role.call(method, *args, **kwargs)
        except RoleDiedError as error:
            if error.role not in (None, self._role.spec.name):
                raise  # another role's death, passed on by this one
            await self._revive(called, error)
            raise RoleRestartedError(str(error)) from error

    def _is_serving(self, incarnation: int) -> bool:
        return self._role.incarnation == incarnation and self._role.state == "serving"

    async def _revive(self, died: int, error: RoleDiedError) -> None:
        """Revive the role, once per death."""
        async with self._lock:
            if self.incarnation > died:
                return
            while True:
                died = await next_incarnation(self._role, died, error)
                await self._on_lost(error)
                self.num_restarts += 1
                try:
                    await self._start()
                except RoleDiedError as again:
                    error = again
                    continue
                self.incarnation = died
                return


async def next_incarnation(role: Role, incarnation: int, error: Exception) -> int:
    """Wait for the restart of a role that a call found dead; return the number of its new incarnation.

    Args:
        role: The role.
        incarnation: The incarnation that died.
        error: The call's error.

    Raises:
        RoleDiedError: The role is not restarted.
        DeadlineError: The death was not noticed in time.
    """
    try:
        async with asyncio.timeout(NEWS_DEADLINE_S):
            while (
                role.state == "serving" and role.incarnation == incarnation
            ):  # a call can fail before the state changes
                await role.changed()
    except TimeoutError:
        raise DeadlineError(f"{role.spec} did not answer, as if dead, but is still running: {error}") from error
    while role.state == "restarting":  # bounded: restarts are limited in number and time
        await role.changed()
    if role.state in ("dead", "closed"):
        raise role.death or error
    return role.incarnation
