"""Tools that are Python functions."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_rollout.tools.blocking import BlockingCalls
from rl_rollout.tools.results import result_text
from rl_rollout.tools.signatures import Signature


class FunctionTool:
    """A function that a model can call. Create it with `tool`.

    Attributes:
        name: Name for the model.
        description: Purpose of the tool, for the model.
        parameters: JSON schema of the arguments.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        """Read the function's signature and docstring.

        Raises:
            SettingsError: Its parameters cannot be represented as JSON.
            MissingExtraError: pydantic is not installed.
        """
        if not callable(function):
            raise SettingsError(f"a tool must be a function; found {type(function).__name__}.")
        self._function = function
        self._signature = Signature(function)
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.description = description or self._signature.description
        self.parameters: Mapping[str, Json] = self._signature.schema
        self._is_async = inspect.iscoroutinefunction(function)
        self._blocking = BlockingCalls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly."""
        return self._function(*args, **kwargs)

    async def call(self, arguments: Mapping[str, Json]) -> str:
        """Run one call, as `Tool.call` does. A plain `def` runs in a thread, which is abandoned on cancellation.

        Raises:
            DataError: The arguments do not fit the signature.
            ToolError: Too many earlier calls still run, or the function returned something that must be awaited.
        """
        bound = self._signature.bind(arguments)
        if self._is_async:
            return result_text(await self._function(**bound))
        return result_text(await self._blocking.run(lambda: self._function(**bound)))

    def close(self) -> None:
        """Stop the idle threads."""
        self._blocking.close()


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> Any:
    """Create a tool from a `def` or an `async def`. Use it as `@tool` or `@tool(name="...")`.

    The schema comes from the signature: str, int, float, bool, list, dict, Literal, dataclasses, unions, defaults. The
    description is the docstring before its first section; `Args:` describes each parameter. A text result goes to the
    model unchanged, any other result as JSON.

    Args:
        function: The function. A `def` runs in a thread, so it may block.
        name: Name for the model; by default, the function's own.
        description: Replaces the docstring's.

    Raises:
        SettingsError: A parameter has no type, or one that JSON cannot represent.
        MissingExtraError: pydantic is not installed.
    """
    if function is not None:
        return FunctionTool(function, name=name, description=description)
    return lambda given: FunctionTool(given, name=name, description=description)
