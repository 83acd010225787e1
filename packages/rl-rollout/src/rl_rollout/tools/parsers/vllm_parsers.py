"""vLLM's parsers of tool calls and reasoning, for model formats that this package does not parse itself."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from rl_core.data import Json
from rl_core.errors import MissingExtraError, SettingsError
from rl_core.registry import unknown_name
from rl_rollout.prompts.tokenizer import PromptTokenizer
from rl_rollout.rewards.answers import THINKING, THOUGHT
from rl_rollout.tools.parsers.protocol import ParsedTurn, read_arguments

try:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager
except ImportError as error:
    raise MissingExtraError("vLLM's parsers need vLLM. Install rl-rollout[vllm] as the README says.") from error

log = structlog.get_logger(__name__)
MAX_TOOLSETS = 64
CALL_MARK = re.compile("</?tool_call>")


class VLLMParser:
    """Parses a turn as vLLM's own server does. If a parser raises an error, the turn stays unchanged."""

    stop_tokens = ()

    def __init__(
        self, tokenizer: PromptTokenizer, *, calls: str | None, reasoning: str | None, ends: Sequence[str]
    ) -> None:
        """Load the parsers.

        Args:
            tokenizer: The policy's tokenizer.
            calls: vLLM's name of a tool call parser; None parses no calls.
            reasoning: vLLM's name of a reasoning parser; None reads `<think>`.
            ends: Texts of the tokens that end a turn.

        Raises:
            SettingsError: vLLM has no such parser, or the parser does not support this tokenizer.
        """
        self._tokenizer = get_cached_tokenizer(tokenizer.wrapped)
        self._ends = tuple(ends)
        self._calls, self._reasoning = calls, None
        self._known: dict[tuple[str, ...], tuple[Any, ChatCompletionRequest]] = {}
        if calls is not None:
            _require(calls, ToolParserManager.list_registered(), option="tool_parser")
            if calls == "openai":
                raise SettingsError('tool_parser: vLLM reads calls of gpt-oss in tokens only. Use "gpt_oss".')
            self._try("tool_parser", calls, lambda: self._parser({"try": {"type": "object"}})[0])
        if reasoning is not None:
            _require(reasoning, ReasoningParserManager.list_registered(), option="reasoning_parser")
            parser_class = ReasoningParserManager.get_reasoning_parser(reasoning)
            self._reasoning = self._try("reasoning_parser", reasoning, lambda: parser_class(self._tokenizer))

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Parse a turn, as in `ToolParser.parse`."""
        for end in self._ends:
            text = text.removesuffix(end)
        try:
            return self._parse(text, parameters)
        except Exception as error:  # vLLM's parsers may raise any error for the output of a policy in training
            log.warning("gateway_parser_failed", error=f"{type(error).__name__}: {error}")
            return ParsedTurn(answer=text)

    def _parse(self, text: str, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        parser, request = self._parser(parameters)
        reasoning, before, content = None, "", text
        if self._reasoning is not None:
            reasoning, rest = self._reasoning.extract_reasoning(text, request)
            content = rest or ""
        elif text.lstrip().startswith(THINKING):
            thought, _, content = text.partition(THOUGHT)
            reasoning = thought.lstrip().removeprefix(THINKING).strip()
        else:
            before, content = _after_opened_thinking(text)
        if parser is None:
            return ParsedTurn(answer=before + content, reasoning=reasoning or "")
        parser.skip_reasoning_parsing = True  # in its content, marks of thinking are text
        found = parser.extract_tool_calls(content, request)
        calls = tuple(read_arguments(one.function.arguments, name=one.function.name) for one in found.tool_calls)
        return ParsedTurn(calls=calls, answer=before + (found.content or ""), reasoning=reasoning or "")

    def _parser(self, parameters: Mapping[str, Mapping[str, Json]]) -> tuple[Any, ChatCompletionRequest]:
        """Return the call parser for some tools, or None without tools, and the request to pass to it."""
        key = tuple(f"{name} {schema}" for name, schema in parameters.items())
        if key not in self._known:
            tools = [
                {"type": "function", "function": {"name": name, "parameters": _with_types(schema)}}
                for name, schema in parameters.items()
            ]
            given = {"tools": tools} if tools else {}
            request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="policy", **given)
            has_calls = self._calls is not None and tools
            parser_class = ToolParserManager.get_tool_parser(self._calls) if has_calls else None
            if len(self._known) >= MAX_TOOLSETS:
                self._known.clear()
            parser = parser_class and parser_class(self._tokenizer, request.tools)
            engine = getattr(parser, "_parser_engine", None)
            if engine is not None:  # it reads whole turns; arguments for a stream cost it cubic time
                engine._stream_arg_deltas = False
            self._known[key] = parser, request
        return self._known[key]

    @staticmethod
    def _try(option: str, name: str, make: Any) -> Any:
        try:
            return make()
        except Exception as error:
            raise SettingsError(f"{option}: vLLM's parser {name!r} refuses this tokenizer: {error}") from error


def _after_opened_thinking(text: str) -> tuple[str, str]:
    """Split a turn after the thinking that its prompt opened; a `</think>` inside a call is an argument."""
    thought, closing, rest = text.partition(THOUGHT)
    next_mark = CALL_MARK.search(rest)
    is_argument = thought.rfind("<tool_call>") > thought.rfind("</tool_call>") and next_mark and "/" in next_mark[0]
    return (thought + closing, rest) if closing and not is_argument else ("", text)


def _with_types(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Return a tool's schema with the types of what its parameters refer to: vLLM does not follow a `$ref`."""
    targets, properties = schema.get("$defs"), schema.get("properties")
    if not isinstance(targets, Mapping) or not isinstance(properties, Mapping):
        return dict(schema)

    def typed(part: Json) -> Json:
        if not isinstance(part, Mapping):
            return part
        target = targets.get(str(part.get("$ref")).removeprefix("#/$defs/"))
        found = {key: target[key] for key in ("type", "enum") if key in target} if isinstance(target, Mapping) else {}
        unions = {key: part[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(part.get(key), list)}
        return {**part, **found, **{key: list(map(typed, parts)) for key, parts in unions.items()}}

    return {**schema, "properties": {name: typed(part) for name, part in properties.items()}}


def _require(name: str, known: Sequence[str], *, option: str) -> None:
    if name not in known:
        raise SettingsError(f"{option}: {unknown_name('vLLM parser', name, known)}")
