"""Finds the calls of a turn among its thinking and its text."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rl_rollout.rewards.answers import THINKING, THOUGHT
from rl_rollout.tools.parsers.protocol import ParsedTurn
from rl_rollout.tools.protocol import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
BOUNDARY = re.compile(f"{OPENING}|{CLOSING}")
BEGINNINGS = ("{", "[", "<")
"""Characters with which the body of a call can begin, well formed or not."""
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
"""Code in backticks."""


class CallBlock(NamedTuple):
    """Text that a model wrote as a call.

    Attributes:
        opening: Opening mark; empty if only the closing mark is present.
        body: Text after the opening mark, up to the closing mark or else the next opening mark.
        is_closed: True if the closing mark is present.
        start: Index of its start in the turn.
    """

    opening: str
    body: str
    is_closed: bool
    start: int


class BodyEnd(NamedTuple):
    """End of a call's body, and of the call.

    Attributes:
        body: Index of the end of the body.
        call: Index of the end of the closing mark, or of the body without one. Reading continues here.
        is_closed: True if there is a closing mark.
    """

    body: int
    call: int
    is_closed: bool


def call_blocks(text: str, *, openings: Sequence[str], find_end: Callable[[str, str, int], BodyEnd]) -> list[CallBlock]:
    """Return the calls of a turn in order, without calls inside its thinking.

    Thinking is the text between `<think>` and the next `</think>`, or the rest of the turn if it is never closed. If
    the first of these marks is `</think>`, the prompt opened the thinking, so all text before it is thinking. Marks
    inside a closed call belong to its arguments.

    Args:
        text: Text of the turn.
        openings: Opening marks of calls.
        find_end: Finds the end of a body, from the text, the opening mark and the start of the body.
    """
    marks = re.compile("|".join(map(re.escape, (THINKING, THOUGHT, *openings, CLOSING))))
    blocks: list[CallBlock] = []
    position, has_thought = 0, False
    while mark := marks.search(text, position):
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
                blocks.append(CallBlock("", "", is_closed=True, start=mark.start()))
        else:
            end = find_end(text, mark[0], position)
            body = text[position : end.body]
            if end.is_closed or has_thought or THOUGHT not in body:  # otherwise the mark is part of the thinking
                blocks.append(CallBlock(mark[0], body, end.is_closed, mark.start()))
                position = end.call
    return blocks


def read_blocks(
    blocks: Iterable[CallBlock], text: str, *, tools: Iterable[str], read: Callable[[CallBlock], ToolCall]
) -> ParsedTurn:
    """Read the blocks as calls, without unreadable ones in which the answer only mentions the marks of a call.

    Unreadable code in backticks is a mention, and so is prose between the marks or after one. Where this is ambiguous,
    the block is read as vLLM's parsers do: a well formed call is a call also in backticks, and an opening mark without
    anything after it is text.

    Args:
        blocks: Blocks of the turn.
        text: Text of the turn.
        tools: Names of the tools. Prose with one of them may be a call.
        read: Reads a block.
    """
    names = tuple(name for name in tools if name)
    bare = CODE.sub(lambda code: "`" * len(code[0]), text)
    found = [(block, read(block)) for block in blocks]
    kept = [(block, call) for block, call in found if call.fault is None or not _is_mention(block, bare, names)]
    return ParsedTurn(calls=tuple(call for _, call in kept), calls_at=kept[0][0].start if kept else None)


def _is_mention(block: CallBlock, bare: str, names: tuple[str, ...]) -> bool:
    """Return True if an unreadable block is no call; `bare` is the turn with backticks instead of code."""
    if bare[block.start] == "`":
        return True
    if not block.opening:
        return not bare[: block.start].rstrip().endswith(("}", ">"))
    body = (block.body if block.opening == OPENING else block.body.partition(">")[2]).strip()
    if body.startswith(BEGINNINGS):
        return False
    if block.is_closed:
        return "{" not in block.body and not any(name in block.body for name in names)
    return not body.startswith(names) and (bool(body) or block.opening == OPENING)


def tagged_body_end(text: str, start: int) -> BodyEnd:
    """Return the end of a body at `</tool_call>`, unless another call begins before it."""
    boundary = BOUNDARY.search(text, start)
    if boundary is not None and boundary[0] == CLOSING:
        return BodyEnd(boundary.start(), boundary.end(), is_closed=True)
    return unclosed(boundary, text)


def unclosed(next_opening: re.Match[str] | None, text: str) -> BodyEnd:
    """Return the end of an unclosed body: the next call, or the end of the turn."""
    end = len(text) if next_opening is None else next_opening.start()
    return BodyEnd(end, end, is_closed=False)
