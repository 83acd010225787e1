"""Parser of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from rl_core.data import Json
from rl_rollout.tools.parsers.markup import (
    CLOSING,
    OPENING,
    Block,
    BodyEnd,
    call_blocks,
    read_blocks,
    tagged_body_end,
    unclosed,
)
from rl_rollout.tools.parsers.protocol import ParsedTurn
from rl_rollout.tools.parsers.schema_types import allowed_types
from rl_rollout.tools.protocol import ToolCall

FUNCTION, FUNCTION_END = "<function=", "</function>"
FORM = f"{OPENING}{FUNCTION}NAME><parameter=KEY>VALUE</parameter>{FUNCTION_END}{CLOSING}"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
BOUNDARY = re.compile(f"{OPENING}|{FUNCTION}|{FUNCTION_END}|{CLOSING}|{PARAMETER}")
VALUE_END = re.compile(
    rf"{PARAMETER_END}(?=\s*(?:{PARAMETER}|{FUNCTION_END}|{CLOSING}))|(?:{OPENING}\s*)?{FUNCTION}[^<>]*>\s*{PARAMETER}"
)
"""The end of a value, or the next call with parameters if the value has none."""
INNER = re.compile(rf"\s*{FUNCTION}")
CLOSING_TOO = re.compile(rf"(?:\s*{CLOSING})?")


class Qwen3CoderParser:
    """Reads XML-like calls, also without `<tool_call>` or `</tool_call>`, which models sometimes omit.

    A value is text if the tool's schema allows a string, otherwise JSON. "null" becomes None if the schema also allows
    null. It ends at the first `</parameter>` before another mark, so that it may contain `</parameter>` and
    `<function=x>`, but no call with parameters.
    """

    stop_tokens = ()
    openings = (OPENING, FUNCTION)

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Find the calls of a turn. See `ToolParser.parse`."""
        found = call_blocks(text, openings=(OPENING, FUNCTION), find_end=_find_end)
        return read_blocks(found, text, tools=parameters, read=lambda block: _read(block, parameters))


def _find_end(text: str, opening: str, start: int) -> BodyEnd:
    """Find the end of a call, whatever marks its values contain."""
    inner = INNER.match(text, start) if opening == OPENING else None
    if opening == OPENING and inner is None:
        return tagged_body_end(text, start)
    position = start if inner is None else inner.end()
    while boundary := BOUNDARY.search(text, position):
        position = boundary.end()
        if boundary[0] == PARAMETER:
            value_end = VALUE_END.search(text, position)
            if value_end is not None and value_end[0] == PARAMETER_END:
                position = value_end.end()
            elif (end := text.find(FUNCTION_END, position, value_end.start() if value_end else len(text))) < 0:
                return unclosed(value_end, text)
            else:
                position = end
        elif boundary[0] == FUNCTION_END:
            after = CLOSING_TOO.match(text, position)
            return BodyEnd(position, after.end() if after else position, is_closed=True)
        elif boundary[0] == CLOSING and inner is not None:
            return BodyEnd(boundary.start(), position, is_closed=True)
        elif boundary[0] != CLOSING:
            return unclosed(boundary, text)
    return unclosed(None, text)


def _read(block: Block, parameters: Mapping[str, Mapping[str, Json]]) -> ToolCall:
    if not block.is_closed or not block.opening:
        missing = FUNCTION_END if block.opening else FUNCTION
        return ToolCall(name="", fault=f"a tool call has no {missing}. Write calls as {FORM}.")
    body = (FUNCTION + block.body if block.opening == FUNCTION else block.body).strip()
    head, _, inner = body.removeprefix(FUNCTION).removesuffix(FUNCTION_END).partition(">")
    name = head.strip()
    if not body.startswith(FUNCTION) or not body.endswith(FUNCTION_END) or not name:
        return ToolCall(name="", fault=f"a tool call has no <function=NAME>...</function>. Write calls as {FORM}.")
    root = parameters.get(name)
    properties = root.get("properties") if isinstance(root, Mapping) else None
    before, *blocks = inner.split(PARAMETER)
    arguments: dict[str, Any] = {}
    is_readable = not before.strip()
    for piece in blocks:
        key, _, rest = piece.partition(">")
        value, end, after = rest.rpartition(PARAMETER_END)
        is_readable &= bool(end) and not after.strip()
        key = key.strip()
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"), schema, root)
    if not is_readable:
        return ToolCall(name=name, fault=f"the parameters of {name} cannot be read. Write calls as {FORM}.")
    return ToolCall(name=name, arguments=arguments)


def _value(text: str, schema: object, root: object) -> Any:
    """Return the text if the schema allows a string; otherwise parse it as JSON, or keep it if that fails."""
    types = allowed_types(schema, text, root=root)
    if types is not None and "string" in types:
        return None if text.strip() == "null" and "null" in types else text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None} if types is not None else {}
        return words.get(text.strip(), text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
