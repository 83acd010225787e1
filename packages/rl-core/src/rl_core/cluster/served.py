"""The role's side of every placement: an object made from its spec, and calls to its methods."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from rl_core.cluster.messages import RemoteError
from rl_core.cluster.processes.packing import Packed, pack, unpack
from rl_core.cluster.role_spec import RoleContext, RoleSpec, load_factory, takes_context
from rl_core.errors import RoleError, SettingsError


class ServedRole:
    """One role's object."""

    def __init__(self) -> None:
        """Initialize without an object."""
        self._target: Any = None
        self._spec: RoleSpec | None = None

    async def make(self, spec: RoleSpec, context: RoleContext) -> None:
        """Make the object with its factory, which may use the context.

        Raises:
            SettingsError: The factory does not exist.
            Exception: Whatever the factory raised.
        """
        self._spec = spec
        factory, kwargs = load_factory(spec.factory), spec.kwargs
        if "context" not in kwargs and takes_context(factory):
            kwargs = {**kwargs, "context": context}
        made = factory(**kwargs)
        self._target = await made if inspect.isawaitable(made) else made

    async def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a sync or async method.

        Raises:
            SettingsError: The object has no such method.
            Exception: Whatever the method raised.
        """
        result = self._find(method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def answer(self, packed: Packed) -> Packed:
        """Run a remote call; return (True, result) or (False, RemoteError)."""
        try:
            method, args, kwargs = unpack(packed)
            if not method:
                await self.make(*args)
                return pack((True, None))
            return self._pack_result(method, await self.run(method, args, kwargs))
        except (SystemExit, KeyboardInterrupt) as error:
            _exit(error)
        except BaseException as error:
            return pack((False, RemoteError.of(error)))

    async def close(self) -> None:
        """Call the object's `close`, if defined."""
        target, self._target = self._target, None
        if hasattr(target, "close"):
            result = target.close()
            if inspect.isawaitable(result):
                await result

    def _find(self, method: str) -> Callable[..., Any]:
        found = getattr(self._target, method, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        kind = type(self._target)
        known = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        raise SettingsError(
            f"{self._spec}, of class {kind.__qualname__}, has no method {method!r}; it has "
            f"{', '.join(known) or 'none'}."
        )

    def _pack_result(self, method: str, result: Any) -> Packed:
        try:
            return pack((True, result))
        except TypeError as error:
            raise RoleError(
                f"the result of {method!r} cannot be sent by {self._spec}: {error}. Return plain values, arrays, or "
                "objects whose class can be imported by the caller.",
            ) from error


def _exit(error: SystemExit | KeyboardInterrupt) -> NoReturn:
    """End this process when the role's code exits; other threads and Ray's event loop would survive the exception."""
    traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    code = error.code if isinstance(error, SystemExit) else 1
    if code is None:
        code = 0
    os._exit(code if isinstance(code, int) else 1)
