"""Parser of Hermes, Qwen2.5 and Qwen3: calls are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from rl_core.data import Json
from rl_rollout.rewards.answers import THINKING, THOUGHT
from rl_rollout.tools.parsers.protocol import ParsedTurn, call_with, preview, read_arguments
from rl_rollout.tools.protocol import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MARKS = re.compile("|".join((THINKING, THOUGHT, OPENING, CLOSING)))
BOUNDARY = re.compile(f"{OPENING}|{CLOSING}")
BEGINNINGS = ("{", "[", "<")
"""Characters with which the body of a call can begin, well formed or not."""
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
"""Code in backticks."""
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


class CallBlock(NamedTuple):
    """Text that a model wrote as a call.

    Attributes:
        start: Index of its start in the turn.
        body: Text after the opening mark, up to the closing mark or else the next opening mark.
        end: Index after the closing mark, or after the body without one. Reading continues here.
        is_opened: True if the opening mark is present.
        is_closed: True if the closing mark is present.
    """

    start: int
    body: str
    end: int
    is_opened: bool = True
    is_closed: bool = True


class HermesParser:
    """Reads JSON between each `<tool_call>` and `</tool_call>`.

    An answer that only mentions these marks has no call: unreadable code in backticks is a mention, and so is prose
    between the marks or after one. Where this is ambiguous, the text is read as vLLM's parser does: a well formed call
    is a call also in backticks, and an opening mark without anything after it is text.
    """

    stop_tokens = ()
    openings = (OPENING,)

    def parse(self, text: str, *, parameters: Mapping[str, Mapping[str, Json]]) -> ParsedTurn:
        """Find the calls of a turn. See `ToolParser.parse`."""
        names = tuple(name for name in parameters if name)
        bare = CODE.sub(lambda code: "`" * len(code[0]), text)
        found = [(block, _read(block)) for block in _blocks(text)]
        kept = [(block, call) for block, call in found if call.fault is None or not _is_mention(block, bare, names)]
        return ParsedTurn(calls=tuple(call for _, call in kept), calls_at=kept[0][0].start if kept else None)


def _blocks(text: str) -> list[CallBlock]:
    """Return the calls of a turn in order, without calls inside its thinking.

    Thinking is the text between `<think>` and the next `</think>`, or the rest of the turn if it is never closed. If
    the first of these marks is `</think>`, the prompt opened the thinking, so all text before it is thinking. Marks
    inside a closed call belong to its arguments.
    """
    blocks: list[CallBlock] = []
    position, has_thought = 0, False
    while mark := MARKS.search(text, position):
        position = mark.end()
        if mark[0] == THINKING:
            thought_at = text.find(THOUGHT, position)
            if thought_at < 0:
                break
            position, has_thought = thought_at + len(THOUGHT), True
        elif mark[0] == THOUGHT:
            if not has_thought:
                blocks.clear()
            has_thought = True
        elif mark[0] == CLOSING:
            if not blocks:
                blocks.append(CallBlock(mark.start(), "", position, is_opened=False))
        else:
            block = _block(text, mark)
            if (
                block.is_closed or has_thought or THOUGHT not in block.body
            ):  # otherwise the mark is part of the thinking
                blocks.append(block)
                position = block.end
    return blocks


def _block(text: str, opening: re.Match[str]) -> CallBlock:
    """Return the call that ends after its JSON, whatever its strings contain, or else at the next `</tool_call>`."""
    start = opening.end()
    if brace := BRACE.match(text, start):
        body_end = _json_end(text, brace.end())
        if body_end is not None and (closing := END.match(text, body_end)):
            return CallBlock(opening.start(), text[start:body_end], closing.end())
    boundary = BOUNDARY.search(text, start)
    if boundary is not None and boundary[0] == CLOSING:
        return CallBlock(opening.start(), text[start : boundary.start()], boundary.end())
    end = len(text) if boundary is None else boundary.start()
    return CallBlock(opening.start(), text[start:end], end, is_closed=False)


def _is_mention(block: CallBlock, bare: str, names: tuple[str, ...]) -> bool:
    """Return True if an unreadable block is no call.

    Args:
        block: The block.
        bare: The turn, with backticks instead of code.
        names: Names of the tools. Prose with one of them may be a call.
    """
    if bare[block.start] == "`":
        return True
    if not block.is_opened:
        return not bare[: block.start].rstrip().endswith(("}", ">"))
    body = block.body.strip()
    if body.startswith(BEGINNINGS):
        return False
    if block.is_closed:
        return "{" not in block.body and not any(name in block.body for name in names)
    return not body.startswith(names)


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
    if not block.is_closed or not block.is_opened:
        missing = CLOSING if block.is_opened else OPENING
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
