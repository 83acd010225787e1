"""The controller's end of the teachers: a role that died is started again, and looks for itself what lacks scores."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rl_core.cluster import Role
from rl_core.cluster.lives import next_life, require_life, require_own_death
from rl_core.errors import NotReadyError, RoleDiedError


class TeachersLink:
    """Calls the teachers' role; does nothing where a run has none."""

    def __init__(self, role: Role | None, *, on_lost: Callable[[RoleDiedError], None]) -> None:
        """Speak to a role.

        Args:
            role: The teachers'.
            on_lost: Told of each death.
        """
        self._role = role
        self._on_lost = on_lost
        self._life = 0 if role is None else role.incarnation
        self._is_started = False
        self.num_restarts = 0

    async def start(self) -> None:
        """Start every teacher; again, where the role dies meanwhile."""
        while self._role is not None and not self._is_started:
            try:
                await self._start(self._role)
            except RoleDiedError as error:
                require_own_death(self._role, error)
                await self._revive(self._role, error)

    async def serve(self) -> None:
        """Let the teachers score what arrives; ends only by an error."""
        if self._role is None:
            await asyncio.Event().wait()
            return
        while True:
            try:
                await self._start(self._role)
                await self._role.call("serve")
            except RoleDiedError as error:
                require_own_death(self._role, error)
                await self._revive(self._role, error)

    @property
    def is_started(self) -> bool:
        """True while the teachers are there."""
        return self._role is not None and self._is_started and self._life == self._role.incarnation

    async def issued(self) -> None:
        """Say that prompts were issued."""
        await self._tell("issued")

    async def window(self) -> dict[str, Any]:
        """See `TeacherHost.window`; of teachers that are being started again there is nothing."""
        return await self._tell("window") or {"metrics": {}, "events": []}

    async def _start(self, role: Role) -> None:
        require_life(role, self._life)
        if not self._is_started:
            await role.call("start")
            self._is_started = True

    async def _revive(self, role: Role, error: RoleDiedError) -> None:
        self._on_lost(error)
        self._life, self._is_started = await next_life(role, self._life, error), False
        self.num_restarts += 1

    async def _tell(self, method: str) -> Any:
        if self._role is None or not self._is_started:
            return None
        with suppress(RoleDiedError, NotReadyError):
            return await self._role.call(method)
        return None
