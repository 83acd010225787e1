"""Protocol of the parsers that read calls from a model's text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rl_core.data import Json
from rl_rollout.rewards.outputs import cut
from rl_rollout.rewards.outputs import shown as shown_value
from rl_rollout.tools.protocol import ToolCall

MAX_SHOWN = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What a model's turn asks for.

    Attributes:
        calls: In order; none ends the session.
        answer: What it says to the user, where the format marks it; None where that is the whole turn.
        reasoning: What it thought, where the format marks it otherwise than by `<think>`.
        calls_at: Where the first call begins in the text, if it is known.
    """

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    reasoning: str = ""
    calls_at: int | None = None


class ToolParser(Protocol):
    """Reads one format.

    Whatever the text and the schemas are, nothing is raised: a call that cannot be read is a ToolCall with a fault. A
    parser may also have `openings: tuple[str, ...]`, all that a call can begin with: text before is then shown while a
    turn is sampled.
    """

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Special tokens that end a turn in this format, beside the tokenizer's own end token."""
        ...

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Find the calls of a turn.

        Args:
            text: The turn, special tokens kept.
            parameters: JSON schema of the arguments of each tool, by name.
        """
        ...


def read_arguments(text: str, *, name: str) -> ToolCall:
    """A call of a tool with JSON arguments."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, fault=f"the arguments of {name} are not JSON ({error}): {shown(text)}")
    return call_with(arguments, name=name)


def call_with(arguments: Json, *, name: str) -> ToolCall:
    """A call of a tool, once its arguments were read."""
    if not isinstance(arguments, dict):
        return ToolCall(name=name, fault=f"the arguments of {name} must be a JSON object; found {shown(arguments)}.")
    return ToolCall(name=name, arguments=arguments)


def shown(value: object) -> str:
    """A value, short enough for a message."""
    if isinstance(value, str):
        return cut(value, max_characters=MAX_SHOWN)
    return shown_value(value, max_characters=MAX_SHOWN)
