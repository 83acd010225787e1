"""Tools by name, from packages, user files and MCP servers, and the runner of their calls."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Gt

from rl_core.data import Json, encodable, encodable_json
from rl_core.errors import DataError, SettingsError, ToolError
from rl_core.record_fields import PositiveInt, settings_record
from rl_core.registry import Registry, unknown_name
from rl_rollout.prompts.image_tokens import ImageTokens
from rl_rollout.rewards.outputs import cut, preview, preview_error
from rl_rollout.tools.function import FunctionTool
from rl_rollout.tools.protocol import (
    CallOutcome,
    TextAndImages,
    Tool,
    ToolCall,
    ToolResult,
    refuse_unfinished,
    shortened,
    tool_schema,
)
from rl_rollout.user_code import find_in, outcome_within

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


MAX_ERROR_CHARS = 500


@settings_record
class CallOptions:
    """Limits of tool calls.

    Attributes:
        timeout_s: Maximum seconds of one call.
        max_result_chars: Maximum length of a result, in characters.
        on_large_result: What to do with a longer result: "truncate" it and add a note, or return an "error".
        max_concurrency: Maximum number of concurrent calls, over all sessions.
    """

    timeout_s: Annotated[float, Gt(0)] = 30.0
    max_result_chars: PositiveInt = 8192
    on_large_result: Literal["truncate", "error"] = "truncate"
    max_concurrency: PositiveInt = 64


class ToolRunner:
    """Calls tools. A tool's error becomes text for the model and a counted outcome."""

    def __init__(
        self, toolbox: ToolBox, options: CallOptions | None = None, *, images: ImageTokens | None = None
    ) -> None:
        """Store the tools. Nothing is called yet.

        Args:
            toolbox: The tools.
            options: Limits of calls.
            images: Where tools' images are kept; None for a model that takes none.
        """
        self._toolbox = toolbox
        self._images = images
        self._options = options or CallOptions()
        self._slots = asyncio.Semaphore(self._options.max_concurrency)

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run all calls concurrently. Results are in the order of the calls."""
        return list(await asyncio.gather(*map(self._run_one, calls)))

    async def _run_one(self, given: ToolCall) -> ToolResult:
        try:
            call = replace(given, name=encodable(given.name), arguments=encodable_json(given.arguments))
        except DataError as error:
            return _failed(given, "malformed_call", f"the arguments of {given.name} are {error}")
        if call.fault is not None:
            return _failed(call, "malformed_call", call.fault)
        tool = self._toolbox.get(call.name)
        if tool is None:
            return _failed(call, "unknown_tool", unknown_name("tool", call.name, self._toolbox.names()))
        async with self._slots:
            try:
                value, raised = await outcome_within(self._options.timeout_s, _called(tool, call))
            except TimeoutError:
                return _failed(call, "timed_out", f"{call.name} did not return within {self._options.timeout_s:g} s.")
        if raised is not None:
            return _raised(call, raised)
        if isinstance(value, TextAndImages):
            return await self._with_images(call, value)
        if not isinstance(value, str):
            return _failed(call, "raised", f"{call.name} did not return text ({type(value).__name__}).")
        return self._sized(call, encodable(value))

    async def _with_images(self, call: ToolCall, parts: TextAndImages) -> ToolResult:
        if self._images is None and parts.text:
            left_out = f"{parts.text}\n[images are left out, because this run shows none: {len(parts.images)}]"
            return self._sized(call, encodable(left_out))
        if self._images is None:
            return _failed(call, "raised", f"{call.name} returned an image, which this model does not take.")
        try:
            digests = [await asyncio.to_thread(self._images.put, data) for data in parts.images]
        except DataError as error:
            return _failed(call, "raised", f"{call.name} returned an image that cannot be used: {error}")
        sized = self._sized(call, encodable(parts.text))
        return sized if sized.is_error else replace(sized, images=tuple(digests))

    def _sized(self, call: ToolCall, text: str) -> ToolResult:
        limit = self._options.max_result_chars
        if len(text) <= limit:
            return ToolResult(call=call, text=text)
        if self._options.on_large_result == "error":
            message = f"the result of {call.name} has {len(text)} characters, more than {limit}. Ask for less."
            return _failed(call, "too_large", message)
        return ToolResult(call=call, text=shortened(text, max_chars=limit), outcome="truncated")


async def _called(tool: Tool, call: ToolCall) -> object:
    value: object = await tool.call(call.arguments)
    refuse_unfinished(value)
    return value


def _raised(call: ToolCall, error: BaseException) -> ToolResult:
    if isinstance(error, asyncio.CancelledError):
        return _failed(call, "raised", f"{call.name} was cancelled.")
    if isinstance(error, SystemExit):
        return _failed(call, "raised", f"{call.name} called sys.exit({preview(error.code)}).")
    message = preview_error(error).partition(": ")[2]
    if isinstance(error, DataError):
        return _failed(call, "bad_arguments", f"wrong arguments for {call.name}: {message}")
    if isinstance(error, ToolError):
        return _failed(call, "raised", message)
    return _failed(call, "raised", f"{call.name} raised {preview_error(error)}")


def _failed(call: ToolCall, outcome: CallOutcome, message: str) -> ToolResult:
    return ToolResult(
        call=call, text=encodable(f"Error: {cut(message, max_characters=MAX_ERROR_CHARS)}"), outcome=outcome
    )
