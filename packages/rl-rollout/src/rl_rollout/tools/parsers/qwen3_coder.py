"""Calls as `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`: Qwen3-Coder."""

import json
from collections.abc import Mapping
from typing import Any

from rl_core.records import Json
from rl_rollout.tools.parsers.protocol import ParsedTurn, spoken
from rl_rollout.tools.protocol import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FORM = f"{OPENING}<function=NAME><parameter=KEY>VALUE</parameter></function>{CLOSING}"


class Qwen3CoderParser:
    """XML-like calls; a value is a text where the tool's schema says string, else JSON."""

    stop_tokens = ()

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """See `ToolParser.parse`."""
        blocks = spoken(text).split(OPENING)[1:]
        return ParsedTurn(calls=tuple(_read(block, parameters) for block in blocks))


def _read(block: str, parameters: Mapping[str, Mapping[str, Json]]) -> ToolCall:
    body, closing, _ = block.partition(CLOSING)
    body = body.strip()
    if not closing:
        return ToolCall(name="", fault=f"a tool call has no {CLOSING}. Write calls as {FORM}.")
    if not body.startswith("<function=") or not body.endswith("</function>"):
        return ToolCall(name="", fault=f"a tool call has no <function=NAME>...</function>. Write calls as {FORM}.")
    name, _, inner = body.removeprefix("<function=").removesuffix("</function>").partition(">")
    name = name.strip()
    properties = parameters.get(name, {}).get("properties", {})
    before, *blocks = inner.split("<parameter=")
    arguments: dict[str, Any] = {}
    is_readable = not before.strip()
    for piece in blocks:
        key, _, rest = piece.partition(">")
        value, end, after = rest.partition("</parameter>")
        is_readable &= bool(end) and not after.strip()
        key = key.strip()
        arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"), properties.get(key, {}))
    if not is_readable:
        return ToolCall(name=name, fault=f"the parameters of {name} cannot be read. Write calls as {FORM}.")
    return ToolCall(name=name, arguments=arguments)


def _value(text: str, schema: Mapping[str, Json]) -> Any:
    """JSON where the schema allows more than a string, and where it can be read so; else the text."""
    if schema.get("type") == "string" or (not schema.get("type") and "enum" in schema and text in schema["enum"]):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None}
        return words.get(text.strip(), text)
