"""Tools by name, from packages, the user's files and MCP servers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_rollout.tools.function import FunctionTool
from rl_rollout.tools.protocol import Tool, tool_schema
from rl_rollout.user_files import find_in

TOOLS: Registry[Any] = Registry("tool", {}, group="rl_rollout.tools")


class ToolBox:
    """The tools of a loop."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        """Take tools.

        Raises:
            SettingsError: Two have one name.
        """
        self._tools: dict[str, Tool] = {}
        self.add(tools)

    def add(self, tools: Iterable[Tool]) -> None:
        """Take more tools.

        Raises:
            SettingsError: Two have one name.
        """
        for tool in tools:
            if tool.name in self._tools:
                raise SettingsError(f"two tools have the name {tool.name!r}. Rename one, or leave it out.")
            self._tools[tool.name] = tool

    def names(self) -> list[str]:
        """Names of all tools, sorted."""
        return sorted(self._tools)

    def tools(self) -> list[Tool]:
        """All tools, in the order they were given."""
        return list(self._tools.values())

    def get(self, name: str) -> Tool | None:
        """The tool of this name, or None."""
        return self._tools.get(name)

    def schemas(self) -> list[dict[str, Json]]:
        """All tools as chat templates take them, in the order they were given."""
        return [tool_schema(tool) for tool in self._tools.values()]

    def parameters(self) -> dict[str, Mapping[str, Json]]:
        """JSON schema of the arguments of each tool."""
        return {name: tool.parameters for name, tool in self._tools.items()}

    def close(self) -> None:
        """Close the tools that can be closed."""
        for tool in self._tools.values():
            close = getattr(tool, "close", None)
            if callable(close):
                close()


def resolve_tool(reference: str) -> Tool:
    """Return the tool with this name, or at `path.py:function`.

    Converts a function, and creates a class without arguments.

    Raises:
        SettingsError: The name, file or function does not exist, or is not a tool.
        MissingExtraError: A required library is not installed.
    """
    found = find_in(TOOLS, reference)
    if isinstance(found, type):
        found = found()
    if all(hasattr(found, attribute) for attribute in ("name", "description", "parameters", "call")):
        return found  # type: ignore[no-any-return]
    if not callable(found):
        raise SettingsError(f"tool {reference!r} must be a function or a Tool; found {type(found).__name__}.")
    return FunctionTool(found)


def resolve_tools(references: Sequence[str]) -> list[Tool]:
    """Return several tools. See `resolve_tool`."""
    return [resolve_tool(reference) for reference in references]
