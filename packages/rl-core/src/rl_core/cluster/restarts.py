"""Calls to a role whose callers must know of a restart."""

from functools import partial
from typing import Any

from rl_core.cluster.messages import named
from rl_core.cluster.running_role import Methods, Role
from rl_core.errors import RoleDiedError


class RoleRestartedError(Exception):
    """The role died before it answered and was restarted; the caller decides whether to repeat the call."""


class SupervisedRole:
    """Calls a role; if the role dies, each call raises RoleRestartedError once it is set up again (`Role.set_up`)."""

    def __init__(self, role: Role) -> None:
        """Set the role."""
        self._role = role

    async def ready(self) -> int:
        """Wait while the role restarts; return the incarnation to call."""
        while self._role.state == "restarting":
            await self._role.changed()
        return self._role.incarnation

    def methods(self, *, incarnation: int | None = None) -> Any:
        """Return the methods of its object; see `Methods`.

        Args:
            incarnation: The incarnation to call; None means the current one.
        """
        return Methods(partial(self.call, incarnation))

    async def call(self, incarnation: int | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an incarnation; see `methods`.

        Raises:
            RoleRestartedError: The role died and was restarted.
            RoleDiedError: The role died and may not be restarted, or the call raised another role's death.
        """
        called = await self.ready() if incarnation is None else incarnation
        try:
            if self._role.incarnation != called or self._role.state != "serving":
                raise self._role.death or named(RoleDiedError(f"{self._role.spec} died."), self._role.spec)
            return await self._role.call(method, *args, **kwargs)
        except RoleDiedError as error:
            if error.role not in (None, self._role.spec.name):
                raise  # another role's death, passed on by this one
            await self._role.outlive(called, error)
            raise RoleRestartedError(str(error)) from error
