"""The controller's link to the teachers: a restarted role finds unscored rows by itself."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rl_core.cluster import Role, RoleRestartedError, SupervisedRole
from rl_core.errors import NotReadyError, RoleDiedError


class TeachersLink:
    """Calls the teachers' role; does nothing in a run without teachers."""

    def __init__(self, role: Role | None, *, on_lost: Callable[[RoleDiedError], Awaitable[None]]) -> None:
        """Link to a role.

        Args:
            role: The teachers' role.
            on_lost: Called after each death.
        """
        self._bare = role
        self._role = None if role is None else SupervisedRole(role, on_lost=on_lost, start=self._restart)
        self._was_started = False

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        return 0 if self._role is None else self._role.num_restarts

    @property
    def is_started(self) -> bool:
        """True while the teachers are running."""
        return self._role is not None and self._was_started and self._role.is_current

    async def start(self) -> None:
        """Start every teacher; retry if the role dies during the start."""
        if self._role is not None and not self._was_started:
            with suppress(RoleRestartedError):  # the restart has started them
                await self._role.call("start")
            self._was_started = True

    async def serve(self) -> None:
        """Let the teachers score new rows; ends only by an error."""
        if self._role is None:
            await asyncio.Event().wait()
            return
        while True:
            with suppress(RoleRestartedError):
                await self._role.call("serve")

    async def issued(self) -> None:
        """Notify the teachers of issued prompts."""
        await self._tell("issued")

    async def window(self) -> dict[str, Any]:
        """See `TeacherHost.window`; empty while the teachers restart."""
        return await self._tell("window") or {"metrics": {}, "events": []}

    async def _tell(self, method: str) -> Any:
        """Call the teachers, without waiting if they died."""
        if self._bare is None or not self.is_started:
            return None
        with suppress(RoleDiedError, NotReadyError):
            return await self._bare.call(method)
        return None

    async def _restart(self) -> None:
        if self._bare is not None:
            await self._bare.call("start")
