"""Where the calls of a turn are, among its thinking and its words."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

THINKING, THOUGHT = "<think>", "</think>"
OPENING, CLOSING = "<tool_call>", "</tool_call>"
BOUNDARY = re.compile(f"{OPENING}|{CLOSING}")


class Block(NamedTuple):
    """What a model wrote as a call.

    Attributes:
        opening: What it begins with; empty where only its end is there.
        body: What follows; up to the next opening where no end is there.
        is_closed: Its end is there.
        start: Where it begins in the turn.
    """

    opening: str
    body: str
    is_closed: bool
    start: int


class BodyEnd(NamedTuple):
    """Where a call's body ends, and where the reading goes on.

    Attributes:
        body: Its end.
        call: The end of what closes it, or of the body where nothing does.
        is_closed: Something does.
    """

    body: int
    call: int
    is_closed: bool


def call_blocks(text: str, *, openings: Sequence[str], find_end: Callable[[str, str, int], BodyEnd]) -> list[Block]:
    """The calls of a turn in order, without those that were only thought about.

    Thought is what `<think>` and the next `</think>` enclose, or all that follows where it is never closed. A turn
    whose first such mark is `</think>` began in thinking, which the prompt had opened: all before is thought. Marks
    inside a call that has an end are its arguments.

    Args:
        text: The turn.
        openings: What calls begin with.
        find_end: Given the text, the opening, and where its body begins.
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
            if end.is_closed or has_thought or THOUGHT not in body:  # else: a mark that was thought about
                blocks.append(Block(mark[0], body, end.is_closed, mark.start()))
                position = end.call
    return blocks


def tagged_body_end(text: str, start: int) -> BodyEnd:
    """The end of a body at `</tool_call>`, unless another call begins before."""
    boundary = BOUNDARY.search(text, start)
    if boundary is not None and boundary[0] == CLOSING:
        return BodyEnd(boundary.start(), boundary.end(), is_closed=True)
    return unclosed(boundary, text)


def unclosed(next_opening: re.Match[str] | None, text: str) -> BodyEnd:
    """The end of a body that nothing closes: the next call, or the end of the turn."""
    end = len(text) if next_opening is None else next_opening.start()
    return BodyEnd(end, end, is_closed=False)
