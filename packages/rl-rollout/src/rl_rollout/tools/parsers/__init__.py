"""Parsers of tool calls, one for each model family. The entry points `rl_rollout.tool_parsers` add others."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_rollout.tools.parsers.protocol import ParsedTurn, ToolParser
from rl_rollout.user_code import find_in

if TYPE_CHECKING:
    from rl_rollout.prompts.tokenizer import PromptTokenizer

__all__ = ["TOOL_PARSERS", "VLLM", "ParsedTurn", "ToolParser", "is_of_vllm", "parser_for", "resolve_parser"]

VLLM = "vllm:"
"""Prefix of the names of vLLM's parsers."""
QWEN3_CODER = "qwen3_coder"
"""Name of a parser of vLLM's that needs no prefix."""
TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {
        "hermes": "rl_rollout.tools.parsers.hermes:HermesParser",
        QWEN3_CODER: "rl_rollout.tools.parsers.vllm_parsers:VLLMParser",
        "gpt_oss": "rl_rollout.tools.parsers.gpt_oss:GptOssParser",
    },
    group="rl_rollout.tool_parsers",
)


def is_of_vllm(reference: str) -> bool:
    """Return whether vLLM's parsers read this format. Such a parser needs the tokenizer: see `parser_for`."""
    return reference == QWEN3_CODER or reference.startswith(VLLM)


def resolve_parser(reference: str) -> ToolParser:
    """Create a parser that is not vLLM's: the one with this name, or at `path.py:Class`, without arguments.

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
        reference: A name or place as in `resolve_parser`, "vllm:NAME" for one of vLLM's ("qwen3_coder" needs no
            prefix), or "vllm:" to parse no calls.
        tokenizer: The policy's tokenizer.
        reasoning: "vllm:NAME" for one of vLLM's parsers of reasoning; None reads `<think>`.
        stop_tokens: Tokens that end a turn, in addition to the tokenizer's own end token.

    Raises:
        SettingsError: There is no such parser, or it does not support this tokenizer.
        MissingExtraError: vLLM is not installed.
    """
    if not is_of_vllm(reference):
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
