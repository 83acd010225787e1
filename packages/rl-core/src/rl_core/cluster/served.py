"""The role's side of every placement: one object, made from its spec, whose methods are called."""

import asyncio
import inspect
from typing import Any

from rl_core.cluster.messages import RemoteError
from rl_core.cluster.packing import Packed, pack, unpack
from rl_core.cluster.roles import RoleContext, RoleSpec, make_object


class ServedRole:
    """One role's object."""

    def __init__(self) -> None:
        """Have no object yet."""
        self._target: Any = None

    async def make(self, spec: RoleSpec, context: RoleContext) -> None:
        """Make the object."""
        self._target = await make_object(spec.factory, spec.kwargs, context)

    async def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method, plain or async."""
        result = getattr(self._target, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def answer(self, packed: Packed) -> Packed:
        """Run a call that came from elsewhere; gives (True, result) or (False, RemoteError)."""
        try:
            method, args, kwargs = unpack(packed)
            if not method:
                await self.make(*args)
                return pack((True, None))
            return pack((True, await self.run(method, args, kwargs)))
        except (Exception, asyncio.CancelledError) as error:  # also a result that cannot be pickled
            return pack((False, RemoteError.of(error)))

    async def close(self) -> None:
        """Call the object's `close`, where it has one."""
        target, self._target = self._target, None
        if hasattr(target, "close"):
            result = target.close()
            if inspect.isawaitable(result):
                await result
