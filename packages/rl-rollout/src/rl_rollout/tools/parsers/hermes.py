"""Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5 and Qwen3."""

import json
from collections.abc import Mapping

from rl_core.records import Json
from rl_rollout.tools.parsers.protocol import ParsedTurn, call_with, read_arguments, shown, spoken
from rl_rollout.tools.protocol import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FORM = f'{OPENING}{{"name": "...", "arguments": {{...}}}}{CLOSING}'


class HermesParser:
    """JSON between `<tool_call>` and `</tool_call>`, as often as it comes."""

    stop_tokens = ()

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:  # noqa: ARG002
        """See `ToolParser.parse`."""
        blocks = spoken(text).split(OPENING)[1:]
        return ParsedTurn(calls=tuple(_read(block) for block in blocks))


def _read(block: str) -> ToolCall:
    body, closing, _ = block.partition(CLOSING)
    if not closing:
        return ToolCall(name="", fault=f"a tool call has no {CLOSING}. Write calls as {FORM}.")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(
            name="", fault=f"a tool call is not JSON ({error}): {shown(body.strip())}. Write calls as {FORM}."
        )
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return ToolCall(name="", fault=f"a tool call has no name: {shown(body.strip())}. Write calls as {FORM}.")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as a JSON text
        return read_arguments(arguments, name=call["name"])
    return call_with(arguments, name=call["name"])
