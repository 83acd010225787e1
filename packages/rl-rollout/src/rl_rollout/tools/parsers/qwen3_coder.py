"""Parser of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from rl_core.data import Json
from rl_rollout.tools.parsers.markup import CLOSING, OPENING, Block, BodyEnd, call_blocks, tagged_body_end, unclosed
from rl_rollout.tools.parsers.protocol import ParsedTurn
from rl_rollout.tools.parsers.schema_types import allowed_types
from rl_rollout.tools.protocol import ToolCall

FUNCTION, FUNCTION_END = "<function=", "</function>"
FORM = f"{OPENING}{FUNCTION}NAME><parameter=KEY>VALUE</parameter>{FUNCTION_END}{CLOSING}"
BARE_BOUNDARY = re.compile(f"{OPENING}|{FUNCTION}|{FUNCTION_END}")
INNER = re.compile(rf"\s*{FUNCTION}")
CLOSING_TOO = re.compile(rf"(?:\s*{CLOSING})?")


class Qwen3CoderParser:
    """Reads XML-like calls, also without `<tool_call>` or `</tool_call>`, which models sometimes omit.

    A value is text if the tool's schema allows a string, otherwise JSON. "null" becomes None if the schema also allows
    null.
    """

    stop_tokens = ()
    openings = (OPENING, FUNCTION)

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Find the calls of a turn. See `ToolParser.parse`."""
        blocks = call_blocks(text, openings=(OPENING, FUNCTION), find_end=_find_end)
        calls = tuple(_read(block, parameters) for block in blocks)
        return ParsedTurn(calls=calls, calls_at=blocks[0].start if blocks else None)


def _find_end(text: str, opening: str, start: int) -> BodyEnd:
    if opening == OPENING:
        end = tagged_body_end(text, start)
        inner = INNER.match(text, start)
        if end.is_closed or inner is None:
            return end
        start = inner.end()
    boundary = BARE_BOUNDARY.search(text, start)
    if boundary is None or boundary[0] != FUNCTION_END:
        return unclosed(boundary, text)
    after = CLOSING_TOO.match(text, boundary.end())
    return BodyEnd(boundary.end(), after.end() if after else boundary.end(), is_closed=True)


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
    before, *blocks = inner.split("<parameter=")
    arguments: dict[str, Any] = {}
    is_readable = not before.strip()
    for piece in blocks:
        key, _, rest = piece.partition(">")
        value, end, after = rest.partition("</parameter>")
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
