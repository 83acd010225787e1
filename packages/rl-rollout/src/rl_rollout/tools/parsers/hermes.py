"""Parser of Hermes, Qwen2.5 and Qwen3: calls are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
import re
from collections.abc import Mapping

from rl_core.data import Json
from rl_rollout.tools.parsers.markup import (
    CLOSING,
    OPENING,
    BodyEnd,
    CallBlock,
    call_blocks,
    read_blocks,
    tagged_body_end,
)
from rl_rollout.tools.parsers.protocol import ParsedTurn, call_with, preview, read_arguments
from rl_rollout.tools.protocol import ToolCall

FORM = f'{OPENING}{{"name": "...", "arguments": {{...}}}}{CLOSING}'
ARGUMENTS = ("arguments", "parameters")
"""Keys of the arguments. The second is Llama's, which other models also write."""
BESIDE = {"name", "id", "type", *ARGUMENTS}
BRACE, END = re.compile(r"\s*(?=\{)"), re.compile(rf"\s*{CLOSING}")
DECODER = json.JSONDecoder()
WINDOW = 1024
"""Size of the first window in which the end of a call is searched, in characters."""

LONGEST_WORD = 16
"""Characters before a window's end in which that end may cause an error: it may cut a word, an escape or -Infinity."""


class HermesParser:
    """Reads JSON between each `<tool_call>` and `</tool_call>`. An answer that mentions these marks has no call."""

    stop_tokens = ()
    openings = (OPENING,)

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Find the calls of a turn. See `ToolParser.parse`."""
        found = call_blocks(text, openings=(OPENING,), find_end=_find_end)
        return read_blocks(found, text, tools=parameters, read=_read)


def _find_end(text: str, _: str, start: int) -> BodyEnd:
    """Find the end of the JSON, whatever its strings contain; without valid JSON, find the next `</tool_call>`."""
    if brace := BRACE.match(text, start):
        body_end = _json_end(text, brace.end())
        if body_end is not None and (end := END.match(text, body_end)):
            return BodyEnd(body_end, end.end(), is_closed=True)
    return tagged_body_end(text, start)


def _json_end(text: str, start: int) -> int | None:
    """Return the end of the JSON object that starts here, or None if it is not valid.

    The object is read in growing windows: json's error reports take time in proportion to the text before the error,
    and hostile text can have an error in each call.
    """
    size = WINDOW
    while True:
        window = text[start : start + size]
        try:
            _, end = DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            may_be_cut = error.msg.startswith("Unterminated string") or error.pos >= len(window) - LONGEST_WORD
            if start + size >= len(text) or not may_be_cut:
                return None
            size *= 4
        except (ValueError, RecursionError):  # a number with too many digits, or lists nested too deeply
            return None
        else:
            return start + end


def _read(block: CallBlock) -> ToolCall:
    body = block.body
    if not block.is_closed or not block.opening:
        missing = CLOSING if block.opening else OPENING
        return _faulty(f"a tool call has no {missing}.")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _faulty(f"a tool call is not JSON ({error}): {preview(body.strip())}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return _faulty(f"a tool call has no name: {preview(body.strip())}.")
    name = call["name"]
    key = next((key for key in ARGUMENTS if key in call), None)
    if key is None:
        if call.keys() - BESIDE:
            return ToolCall(
                name=name, fault=f"the call of {name} has no arguments: {preview(body)}. Write it as {FORM}."
            )
        return ToolCall(name=name)
    arguments = call[key]
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        return read_arguments(arguments, name=name)
    return call_with(arguments, name=name)


def _faulty(fault: str) -> ToolCall:
    return ToolCall(name="", fault=f"{fault} Write calls as {FORM}.")
