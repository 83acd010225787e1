"""Parser of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import unquote

from rl_core.data import Json
from rl_rollout.tools.parsers.markup import (
    CLOSING,
    OPENING,
    BodyEnd,
    CallBlock,
    call_blocks,
    read_blocks,
    tagged_body_end,
    unclosed,
)
from rl_rollout.tools.parsers.protocol import ParsedTurn
from rl_rollout.tools.protocol import ToolCall

Types = frozenset[str] | None
"""Names of JSON types; None if all are allowed or the types are unknown."""

MAX_DEPTH = 32


def allowed_types(schema: object, text: str, *, root: object) -> Types:
    """Return the types that a value with this text may have.

    Args:
        schema: Schema of the value.
        text: Text of the value. Listed strings count only if they equal it, or if only strings are listed.
        root: Schema in which `$ref` is resolved.
    """
    return _TypeReader(text, root).read(schema)


class _TypeReader:
    def __init__(self, text: str, root: object) -> None:
        self._text = text
        self._root = root
        self._targets: dict[str, Types] = {}
        self._depth = 0

    def read(self, schema: object) -> Types:
        if not isinstance(schema, Mapping) or self._depth >= MAX_DEPTH:
            return None
        self._depth += 1
        found = [_named(schema.get("type"))]
        if "const" in schema:
            found.append(self._listed([schema["const"]]))
        if isinstance(schema.get("enum"), list):
            found.append(self._listed(schema["enum"]))
        if isinstance(schema.get("$ref"), str):
            found.append(self._target(schema["$ref"]))
        found += [self._union(schema[key]) for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        found += [self.read(part) for part in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
        self._depth -= 1
        known = [types for types in found if types is not None]
        return (frozenset.intersection(*known) or None) if known else None

    def _listed(self, values: Sequence[object]) -> Types:
        strings = [value for value in values if isinstance(value, str)]
        types = {name for value in values if not isinstance(value, str) for name in _types_of(value)}
        if strings and (self._text in strings or len(strings) == len(values)):
            types.add("string")
        return frozenset(types) or None

    def _union(self, schemas: Sequence[object]) -> Types:
        found: set[str] = set()
        for schema in schemas:
            types = self.read(schema)
            if types is None:
                return None
            found |= types
        return frozenset(found) or None

    def _target(self, reference: str) -> Types:
        if reference not in self._targets:
            self._targets[reference] = None  # for a reference that leads back to itself
            self._targets[reference] = self.read(_resolve(reference, self._root))
        return self._targets[reference]


def _resolve(reference: str, root: object) -> object:
    """Return the target of a JSON pointer such as "#/$defs/Color"; None if there is none."""
    start, *steps = reference.split("/")
    found = root if start == "#" else None
    for step in steps:
        if not isinstance(found, Mapping):
            return None
        found = found.get(unquote(step).replace("~1", "/").replace("~0", "~"))
    return found


def _named(name: object) -> Types:
    names = name if isinstance(name, list) else [name]
    return frozenset(name for name in names if isinstance(name, str)) or None


def _types_of(value: object) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number")
    return ("array",) if isinstance(value, list | tuple) else ("object",)


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


def _read(block: CallBlock, parameters: Mapping[str, Mapping[str, Json]]) -> ToolCall:
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
