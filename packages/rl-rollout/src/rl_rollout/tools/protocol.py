"""Protocol of tools, and records of their calls and results."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, Protocol

from rl_core.data import Json
from rl_core.record_fields import record

CallOutcome = Literal[
    "ok", "truncated", "unknown_tool", "malformed_call", "bad_arguments", "raised", "timed_out", "too_large"
]
"""How a call ended. All but "ok" and "truncated" are errors, which the model gets as text."""


class Tool(Protocol):
    """A tool that a model may call."""

    @property
    def name(self) -> str:
        """Name for the model."""
        ...

    @property
    def description(self) -> str:
        """Purpose of the tool, described to the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Json]:
        """JSON schema of its arguments, an object."""
        ...

    async def call(self, arguments: Mapping[str, Json]) -> str:
        """Run one call.

        The model gets any exception as text: a DataError as invalid arguments, a ToolError with its own message, and
        others with their type. A call that times out is cancelled.
        """
        ...


@record
class ToolCall:
    """One call that a model wrote.

    Attributes:
        name: Name of the tool; may be empty if the call is unreadable.
        arguments: Arguments of the call.
        fault: Why the call is unreadable, for the model; None if it is readable.
    """

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    fault: str | None = None


@record
class ToolResult:
    """The outcome of a call.

    Attributes:
        call: The call.
        text: Text for the model.
        outcome: How it ended.
    """

    call: ToolCall
    text: str
    outcome: CallOutcome = "ok"

    @property
    def is_error(self) -> bool:
        """True if the model gets an error instead of a result."""
        return self.outcome not in ("ok", "truncated")


def tool_schema(tool: Tool) -> dict[str, Json]:
    """Return a tool's schema for chat templates: `{"type": "function", "function": {...}}`."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
