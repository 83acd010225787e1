"""Runs the calls of a turn concurrently, with deadlines. It never raises for a tool."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rl_core.data import encodable, encodable_json
from rl_core.errors import DataError, SettingsError, ToolError
from rl_core.record_fields import settings_record
from rl_core.registry import unknown_name
from rl_rollout.rewards.outputs import cut, preview, preview_error
from rl_rollout.tools.protocol import CallOutcome, Tool, ToolCall, ToolResult
from rl_rollout.tools.results import refuse_unfinished, shortened
from rl_rollout.tools.toolbox import ToolBox
from rl_rollout.user_errors import is_meant_for_us

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

    timeout_s: float = 30.0
    max_result_chars: int = 8192
    on_large_result: Literal["truncate", "error"] = "truncate"
    max_concurrency: int = 64

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: An option is invalid.
        """
        if not self.timeout_s > 0 or self.max_result_chars < 1 or self.max_concurrency < 1:
            raise SettingsError(
                "tool calls need timeout_s > 0, max_result_chars >= 1 and max_concurrency >= 1; found "
                f"{self.timeout_s}, {self.max_result_chars} and {self.max_concurrency}."
            )


_Attempt = tuple[object, BaseException | None]
"""Return value of a tool, and the exception that it raised."""


class ToolRunner:
    """Calls tools. A tool's error becomes text for the model and a counted outcome."""

    def __init__(self, toolbox: ToolBox, options: CallOptions | None = None) -> None:
        """Store the tools. Nothing is called yet."""
        self._toolbox = toolbox
        self._options = options or CallOptions()
        self._slots = asyncio.Semaphore(self._options.max_concurrency)
        self._left: set[asyncio.Task[_Attempt]] = set()

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
            return await self._call(tool, call)

    async def _call(self, tool: Tool, call: ToolCall) -> ToolResult:
        task = asyncio.create_task(_attempt(tool, call))
        try:
            await asyncio.wait({task}, timeout=self._options.timeout_s)
        finally:
            if not task.done():  # a task that refuses to be cancelled is abandoned
                self._leave(task)
        if not task.done():
            return _failed(call, "timed_out", f"{call.name} did not return within {self._options.timeout_s:g} s.")
        return self._settled(call, task)

    def _settled(self, call: ToolCall, task: asyncio.Task[_Attempt]) -> ToolResult:
        if task.cancelled():  # by code outside this class, which only cancels unfinished tasks
            return _failed(call, "raised", f"{call.name} was cancelled.")
        value, error = task.result()
        if isinstance(error, asyncio.CancelledError):
            return _failed(call, "raised", f"{call.name} was cancelled.")
        if isinstance(error, SystemExit):
            return _failed(call, "raised", f"{call.name} called sys.exit({preview(error.code)}).")
        if isinstance(error, DataError):
            return _failed(call, "bad_arguments", f"wrong arguments for {call.name}: {_words(error)}")
        if isinstance(error, ToolError):
            return _failed(call, "raised", _words(error))
        if error is not None:
            return _failed(call, "raised", f"{call.name} raised {preview_error(error)}")
        if not isinstance(value, str):
            return _failed(call, "raised", f"{call.name} did not return text ({type(value).__name__}).")
        return self._sized(call, encodable(value))

    def _leave(self, task: asyncio.Task[_Attempt]) -> None:
        task.cancel()
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _sized(self, call: ToolCall, text: str) -> ToolResult:
        limit = self._options.max_result_chars
        if len(text) <= limit:
            return ToolResult(call=call, text=text)
        if self._options.on_large_result == "error":
            message = f"the result of {call.name} has {len(text)} characters, more than {limit}. Ask for less."
            return _failed(call, "too_large", message)
        return ToolResult(call=call, text=shortened(text, max_chars=limit), outcome="truncated")


async def _attempt(tool: Tool, call: ToolCall) -> _Attempt:
    """Call a tool once and return its exception. Raised in a task, SystemExit for example would end the event loop."""
    try:
        value: object = await tool.call(call.arguments)
        refuse_unfinished(value)
    except BaseException as error:
        if is_meant_for_us(error):
            raise
        return None, error
    return value, None


def _failed(call: ToolCall, outcome: CallOutcome, message: str) -> ToolResult:
    return ToolResult(
        call=call, text=encodable(f"Error: {cut(message, max_characters=MAX_ERROR_CHARS)}"), outcome=outcome
    )


def _words(error: Exception) -> str:
    """Return an error's text without its type."""
    return preview_error(error).partition(": ")[2]
