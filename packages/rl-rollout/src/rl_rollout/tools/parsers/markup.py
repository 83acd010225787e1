"""Finds the calls of a turn among its thinking and its text."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

THINKING, THOUGHT = "<think>", "</think>"
OPENING, CLOSING = "<tool_call>", "</tool_call>"
BOUNDARY = re.compile(f"{OPENING}|{CLOSING}")


class Block(NamedTuple):
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


def call_blocks(text: str, *, openings: Sequence[str], find_end: Callable[[str, str, int], BodyEnd]) -> list[Block]:
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
    blocks: list[Block] = []
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
                blocks.append(Block("", "", is_closed=True, start=mark.start()))
        else:
            end = find_end(text, mark[0], position)
            body = text[position : end.body]
            if end.is_closed or has_thought or THOUGHT not in body:  # otherwise the mark is part of the thinking
                blocks.append(Block(mark[0], body, end.is_closed, mark.start()))
                position = end.call
    return blocks


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
