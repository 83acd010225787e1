"""Protocol of tools, records of their calls and results, and the text of a result."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, field, is_dataclass
from typing import Any, Literal, NamedTuple, Protocol

from rl_core.data import Json
from rl_core.errors import ToolError
from rl_core.record_fields import record
from rl_rollout.rewards.outputs import discard, with_article

CallOutcome = Literal[
    "ok", "truncated", "unknown_tool", "malformed_call", "bad_arguments", "raised", "timed_out", "too_large"
]
"""How a call ended. All but "ok" and "truncated" are errors, which the model gets as text."""


class TextAndImages(NamedTuple):
    """A tool's result with images.

    Attributes:
        text: Text for the model.
        images: Encoded images, such as PNG, for the model after the text.
    """

    text: str
    images: tuple[bytes, ...]


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

    async def call(self, arguments: Mapping[str, Json]) -> "str | TextAndImages":
        """Run one call. Return text, or text and images.

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
        images: Digests of images for the model, after the text.
    """

    call: ToolCall
    text: str
    outcome: CallOutcome = "ok"
    images: tuple[str, ...] = ()

    @property
    def is_error(self) -> bool:
        """True if the model gets an error instead of a result."""
        return self.outcome not in ("ok", "truncated")


def tool_schema(tool: Tool) -> dict[str, Json]:
    """Return a tool's schema for chat templates: `{"type": "function", "function": {...}}`."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def result_of(value: Any) -> str | TextAndImages:
    """Return a function's result as `result_text`, or as parts if it is a list of a message's parts with images.

    Raises:
        ToolError: A part is neither text nor an image with bytes, or the value must be awaited or iterated.
    """
    kinds = [part.get("type") if isinstance(part, dict) else None for part in value] if isinstance(value, list) else []
    if "image" not in kinds:
        return result_text(value)
    texts = [part["text"] for part in value if part.get("type") == "text" and isinstance(part.get("text"), str)]
    images = [part["image"] for part in value if part.get("type") == "image" and isinstance(part.get("image"), bytes)]
    if len(texts) + len(images) < len(value):
        raise ToolError(
            'a tool\'s parts must be {"type": "text", "text": ...} and {"type": "image", "image": bytes of a file such '
            f"as PNG}}; found parts of type {kinds}."
        )
    return TextAndImages("\n".join(texts), tuple(images))


def result_text(value: Any) -> str:
    """Return text unchanged, and any other value as JSON.

    Raises:
        ToolError: The value must be awaited or iterated.
    """
    if isinstance(value, str):
        return value
    refuse_unfinished(value)
    return json.dumps(value, ensure_ascii=False, default=_plain)


def refuse_unfinished(value: object) -> None:
    """Refuse a value that must be awaited or iterated. It is closed, so that Python does not warn.

    Raises:
        ToolError: The value is awaitable or a generator.
    """
    if inspect.isawaitable(value):
        discard(value)
        raise ToolError(
            f"the tool returned {with_article(value)} that was never awaited. It must be an `async def` that awaits it."
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        discard(value)
        raise ToolError(f"the tool returned {with_article(value)}: it uses `yield`. It must return its result.")


def shortened(text: str, *, max_chars: int) -> str:
    """Return a text, cut to a maximum length with a note of how much is missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"


def _plain(value: Any) -> Any:
    refuse_unfinished(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
