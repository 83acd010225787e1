"""Roles on this machine: in this process, where a debugger works, or each in its own."""

import asyncio
import inspect
from typing import Any, Literal

from rl_core.cluster.process import ProcessRole
from rl_core.cluster.roles import RoleHandle, RoleSpec, load_factory
from rl_core.errors import NotReadyError

Placement = Literal["inline", "process"]


class InlineRole:
    """A role that is an object of this process."""

    def __init__(self, spec: RoleSpec) -> None:
        """Make the object now."""
        self._spec = spec
        self._target: Any = load_factory(spec.factory)(**spec.kwargs)

    @property
    def spec(self) -> RoleSpec:
        """See `RoleHandle.spec`."""
        return self._spec

    @property
    def is_alive(self) -> bool:
        """See `RoleHandle.is_alive`."""
        return self._target is not None

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `RoleHandle.call`."""
        if self._target is None:
            raise NotReadyError(f"{self._spec} was closed; start it again before calling it.")
        result = getattr(self._target, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """See `RoleHandle.close`."""
        target, self._target = self._target, None
        if target is not None and hasattr(target, "close"):
            result = target.close()
            if inspect.isawaitable(result):
                await result


class LocalCluster:
    """Starts roles on this machine."""

    def __init__(self, placement: Placement) -> None:
        """Choose where roles run: "inline" or "process"."""
        self._placement = placement
        self._roles: list[RoleHandle] = []

    async def start(self, spec: RoleSpec, *, deadline_s: float) -> RoleHandle:
        """See `Cluster.start`."""
        role: RoleHandle
        if self._placement == "inline":
            role = InlineRole(spec)
        else:
            role = await ProcessRole.start(spec, deadline_s=deadline_s)
        self._roles.append(role)
        return role

    async def close(self) -> None:
        """See `Cluster.close`; the first error is raised when every role was asked to end."""
        roles, self._roles = self._roles, []
        results = await asyncio.gather(*(role.close() for role in reversed(roles)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
