"""Finds the calls of a turn among its thinking and its text."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

THINKING, THOUGHT = "<think>", "</think>"
OPENING, CLOSING = "<tool_call>", "</tool_call>"
BOUNDARY = re.compile(f"{OPENING}|{CLOSING}")
BEGINNINGS = ("{", "[", "<")
"""Characters with which the body of a call can begin, well formed or not."""
LINE_CHARS = 80
"""Number of characters before a mark in which prose on its line is searched."""


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


def without_mentions(blocks: Sequence[Block], text: str, *, tools: Iterable[str]) -> list[Block]:
    """Return the blocks without those in which the answer only mentions the marks of a call.

    Args:
        blocks: Blocks of the turn.
        text: Text of the turn.
        tools: Names of the tools. A body with one of them is a call.
    """
    names = tuple(name for name in tools if name)
    return [block for block in blocks if not _is_mention(block, text, names)]


def _is_mention(block: Block, text: str, names: tuple[str, ...]) -> bool:
    body = block.body.strip()
    if not block.opening:
        return not text[: block.start].rstrip().endswith(("}", ">"))
    if block.opening != OPENING or not body or body.startswith((*BEGINNINGS, *names)):
        return False
    line = text[max(block.start - LINE_CHARS, 0) : block.start].rpartition("\n")[2].rpartition(">")[2]
    return not block.is_closed or (bool(line.strip()) and "{" not in body and not any(name in body for name in names))


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
