"""Calls to a role that is started again when it dies, and has work to be started in it before it is of use."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rl_core.cluster.messages import named
from rl_core.cluster.running_role import Role
from rl_core.errors import DeadlineError, RoleDiedError

NEWS_DEADLINE_S = 60.0


class RoleRestartedError(Exception):
    """The role died before it answered, and was restarted; the caller decides whether to repeat the call."""


class SupervisedRole:
    """Calls a role; when it dies, brings it back once, and calls wait until it is back.

    Attributes:
        incarnation: The incarnation in which the work was started.
        num_restarts: How often it was brought back.
    """

    def __init__(
        self,
        role: Role,
        *,
        on_lost: Callable[[RoleDiedError], Awaitable[None]],
        start: Callable[[], Awaitable[None]],
    ) -> None:
        """Supervise a role whose process runs.

        Args:
            role: The role.
            on_lost: Called after each death, when the process runs again.
            start: Then starts the work in it; called again if it dies meanwhile.
        """
        self._role = role
        self._on_lost = on_lost
        self._start = start
        self._lock = asyncio.Lock()
        self.incarnation = role.incarnation
        self.num_restarts = 0

    @property
    def is_current(self) -> bool:
        """False from a death that its process has recovered from until its work is started again."""
        return self.incarnation == self._role.incarnation

    async def ready(self) -> int:
        """Wait while it is brought back; gives the incarnation to call."""
        async with self._lock:
            return self.incarnation

    async def call(self, method: str, *args: Any, incarnation: int | None = None, **kwargs: Any) -> Any:
        """Call a method.

        Args:
            method: Its name.
            args: Its arguments.
            incarnation: The incarnation to call; None is the current one.
            kwargs: Its named arguments.

        Raises:
            RoleRestartedError: It died, and was brought back.
            RoleDiedError: It died, and may not be started again; or another role's death came as the answer.
        """
        called = await self.ready() if incarnation is None else incarnation
        try:
            if not self._is_serving(called):
                raise self._role.death or named(RoleDiedError(f"{self._role.spec} died."), self._role.spec)
            return await self._role.call(method, *args, **kwargs)
        except RoleDiedError as error:
            if error.role not in (None, self._role.spec.name):
                raise  # another role's death, which this one passed on
            await self._revive(called, error)
            raise RoleRestartedError(str(error)) from error

    def _is_serving(self, incarnation: int) -> bool:
        return self._role.incarnation == incarnation and self._role.state == "serving"

    async def _revive(self, died: int, error: RoleDiedError) -> None:
        """Bring it back, once for each death."""
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
    """Wait until a role that a call found dead is started again; gives the number of its new incarnation.

    Args:
        role: Which.
        incarnation: The one that died.
        error: What the call got.

    Raises:
        RoleDiedError: It is not started again.
        DeadlineError: Nobody noticed its death.
    """
    try:
        async with asyncio.timeout(NEWS_DEADLINE_S):
            while role.state == "serving" and role.incarnation == incarnation:  # a call hears of a death first
                await role.changed()
    except TimeoutError:
        raise DeadlineError(f"{role.spec} gave no answer as if it were dead, but runs on: {error}") from error
    while role.state == "restarting":  # its restarts are counted, and each has its deadline
        await role.changed()
    if role.state in ("dead", "closed"):
        raise role.death or error
    return role.incarnation
