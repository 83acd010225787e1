"""Protocol of parsers that read tool calls from a model's text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rl_core.data import Json
from rl_rollout.rewards.outputs import cut
from rl_rollout.rewards.outputs import preview as preview_value
from rl_rollout.tools.protocol import ToolCall

MAX_PREVIEW = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """Contents of a model's turn.

    Attributes:
        calls: Calls in order; empty ends the session.
        answer: Text for the user, if the format marks it; None if it is the whole turn.
        reasoning: Thinking that the format marks with something other than `<think>`.
        calls_at: Index of the first call in the text, if known.
    """

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    reasoning: str = ""
    calls_at: int | None = None


class ToolParser(Protocol):
    """Reads one format.

    A parser never raises, whatever the text and schemas are: an unreadable call becomes a ToolCall with a fault. A
    parser may also have `openings: tuple[str, ...]`, all strings with which a call can begin. The text before them is
    then streamed while the turn is sampled.
    """

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Special tokens that end a turn in this format, in addition to the tokenizer's own end token."""
        ...

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Find the calls of a turn.

        Args:
            text: Text of the turn, including special tokens.
            parameters: JSON schema of each tool's arguments, by name.
        """
        ...


def read_arguments(text: str, *, name: str) -> ToolCall:
    """Return a call of a tool from arguments in JSON."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, fault=f"the arguments of {name} are not JSON ({error}): {preview(text)}")
    return call_with(arguments, name=name)


def call_with(arguments: Json, *, name: str) -> ToolCall:
    """Return a call of a tool from parsed arguments."""
    if not isinstance(arguments, dict):
        return ToolCall(name=name, fault=f"the arguments of {name} must be a JSON object; found {preview(arguments)}.")
    return ToolCall(name=name, arguments=arguments)


def preview(value: object) -> str:
    """Return a value as text that is short enough for a message."""
    if isinstance(value, str):
        return cut(value, max_characters=MAX_PREVIEW)
    return preview_value(value, max_characters=MAX_PREVIEW)
