"""What a tool is, what a model asks of it, and what it gets back."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, Protocol

from rl_core.data import Json
from rl_core.record_fields import record

CallOutcome = Literal[
    "ok", "truncated", "unknown_tool", "malformed_call", "bad_arguments", "raised", "timed_out", "too_large"
]
"""How a call ended; every one but the first two is an error, told to the model as text."""


class Tool(Protocol):
    """Something that a model may call."""

    @property
    def name(self) -> str:
        """The name that the model calls it by."""
        ...

    @property
    def description(self) -> str:
        """What it is for, in the model's words."""
        ...

    @property
    def parameters(self) -> Mapping[str, Json]:
        """JSON schema of its arguments, an object."""
        ...

    async def call(self, arguments: Mapping[str, Json]) -> str:
        """Run once.

        Whatever it raises goes back to the model as text: a DataError as wrong arguments, a ToolError in its own
        words, anything else with its type.
        A cancelled call is a call that took too long.
        """
        ...


@record
class ToolCall:
    """One call that a model wrote.

    Attributes:
        name: Of the tool; may be empty where the call could not be read.
        arguments: What to call it with.
        fault: Why the call could not be read, told to the model; None when it could.
    """

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    fault: str | None = None


@record
class ToolResult:
    """Outcome of a call.

    Attributes:
        call: The call.
        text: What the model reads.
        outcome: How it ended.
    """

    call: ToolCall
    text: str
    outcome: CallOutcome = "ok"

    @property
    def is_error(self) -> bool:
        """True when the model gets an error's text instead of a result."""
        return self.outcome not in ("ok", "truncated")


def tool_schema(tool: Tool) -> dict[str, Json]:
    """A tool as chat templates take it: `{"type": "function", "function": {...}}`."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
