"""Protocol of parsers that read tool calls from a model's text, and the parsers by name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rl_core.data import Json
from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_rollout.rewards.outputs import cut
from rl_rollout.rewards.outputs import preview as preview_value
from rl_rollout.tools.protocol import ToolCall
from rl_rollout.user_files import find_in

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


if TYPE_CHECKING:
    from rl_rollout.prompts.tokenizer import PromptTokenizer

VLLM = "vllm:"
"""Prefix of the names of vLLM's parsers."""
TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {
        "hermes": "rl_rollout.tools.parsers.hermes:HermesParser",
        "qwen3_coder": "rl_rollout.tools.parsers.qwen3_coder:Qwen3CoderParser",
        "gpt_oss": "rl_rollout.tools.parsers.gpt_oss:GptOssParser",
    },
    group="rl_rollout.tool_parsers",
)


def resolve_parser(reference: str) -> ToolParser:
    """Create the parser with this name, or at `path.py:Class`, without arguments.

    Raises:
        SettingsError: The name, file or class does not exist, or has no `parse`.
    """
    parser_class = find_in(TOOL_PARSERS, reference)
    if not isinstance(parser_class, type) or not hasattr(parser_class, "parse"):
        raise SettingsError(f"tool parser {reference!r} must be a class with `parse`; found {parser_class!r}.")
    parser: ToolParser = parser_class()
    return parser


def parser_for(
    reference: str, tokenizer: "PromptTokenizer", *, reasoning: str | None = None, stop_tokens: Sequence[str] = ()
) -> ToolParser:
    """Create the parser for a tokenizer.

    Args:
        reference: A name or place as in `resolve_parser`, "vllm:NAME" for one of vLLM's, or "vllm:" to parse no calls.
        tokenizer: The policy's tokenizer.
        reasoning: "vllm:NAME" for one of vLLM's parsers of reasoning; None reads `<think>`.
        stop_tokens: Tokens that end a turn, in addition to the tokenizer's own end token.

    Raises:
        SettingsError: There is no such parser, or it does not support this tokenizer.
        MissingExtraError: vLLM is not installed.
    """
    if not reference.startswith(VLLM):
        return resolve_parser(reference)
    from rl_rollout.tools.parsers.vllm_parsers import VLLMParser  # imports vLLM

    own = tokenizer.eos_token_id
    ends = () if own is None else tokenizer.decode([[own]], skip_special_tokens=False)
    return VLLMParser(
        tokenizer,
        calls=reference.removeprefix(VLLM) or None,
        reasoning=reasoning and reasoning.removeprefix(VLLM),
        ends=(*stop_tokens, *ends),
    )
