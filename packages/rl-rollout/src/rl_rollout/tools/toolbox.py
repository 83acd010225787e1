"""Tools by name, from packages, user files and MCP servers."""

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
        """Store the tools.

        Raises:
            SettingsError: Two tools have the same name.
        """
        self._tools: dict[str, Tool] = {}
        self.add(tools)

    def add(self, tools: Iterable[Tool]) -> None:
        """Add tools.

        Raises:
            SettingsError: Two tools have the same name.
        """
        for tool in tools:
            if tool.name in self._tools:
                raise SettingsError(f"two tools have the name {tool.name!r}. Rename or remove one of them.")
            self._tools[tool.name] = tool

    def names(self) -> list[str]:
        """Return the names of all tools, sorted."""
        return sorted(self._tools)

    def tools(self) -> list[Tool]:
        """Return all tools, in the order they were added."""
        return list(self._tools.values())

    def get(self, name: str) -> Tool | None:
        """Return the tool with this name, or None."""
        return self._tools.get(name)

    def schemas(self) -> list[dict[str, Json]]:
        """Return the schemas of all tools for chat templates, in the order they were added."""
        return [tool_schema(tool) for tool in self._tools.values()]

    def parameters(self) -> dict[str, Mapping[str, Json]]:
        """Return the JSON schema of each tool's arguments, by name."""
        return {name: tool.parameters for name, tool in self._tools.items()}

    def close(self) -> None:
        """Close the tools that have a `close` method."""
        for tool in self._tools.values():
            close = getattr(tool, "close", None)
            if callable(close):
                close()


def resolve_tool(reference: str) -> Tool:
    """Return the tool with this name, or at `path.py:function`.

    A function is wrapped, and a class is created without arguments.

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
    """Return several tools, as `resolve_tool` does."""
    return [resolve_tool(reference) for reference in references]
