"""The selection of steps that use a skip cache: all, a list, or ranges."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.errors import SettingsError

RANGE = re.compile(r"(\d{1,18})(?:\s*(-)\s*(\d{1,18})?)?", re.ASCII)
BRACKETS = re.compile(r"\[(.*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepSelection:
    """A set of steps, as sorted ranges that are neither overlapping nor adjacent.

    Attributes:
        ranges: First and last step of each range, counted from 1; a last step of None means no end.
    """

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, steps: str | int | Sequence[int]) -> "StepSelection":
        """Parse "all", one step, a list of steps, or ranges such as "1-20,40" and "100-".

        Raises:
            SettingsError: The value has another form, selects no step, or has a range that ends before it starts.
        """
        found: list[tuple[int, int | None]]
        if isinstance(steps, str):
            text = steps.strip()
            in_brackets = BRACKETS.fullmatch(text)
            parts = (in_brackets[1] if in_brackets else text).split(",")
            found = [(1, None)] if text == "all" else [_read_range(part, steps) for part in parts]
        elif isinstance(steps, int):
            found = [(_read_step(steps, steps), steps)]
        elif not isinstance(steps, Sequence):
            raise SettingsError(f"steps must be a string or a list; found {steps!r}. {EXAMPLES}")
        else:
            found = [(first, first) for first in (_read_step(step, steps) for step in steps)]
        if not found:
            raise SettingsError(f"steps must name at least one step; found {steps!r}. {EXAMPLES}")
        return cls(tuple(_merged(found)))

    def __contains__(self, step: int) -> bool:
        return any(first <= step and (last is None or step <= last) for first, last in self.ranges)

    @property
    def last(self) -> int | None:
        """Return the last selected step; None if there is no end."""
        return self.ranges[-1][1]

    def at(self, index: int) -> int:
        """Return a selected step by its index from 0; the selection has an end."""
        for first, last in self.ranges:
            if last is None or first + index <= last:
                return first + index
            index -= last - first + 1
        raise IndexError("the selection has fewer steps")

    def count_before(self, step: int) -> int:
        """Return the number of selected steps before a step."""
        total = 0
        for first, last in self.ranges:
            end = step - 1 if last is None else min(last, step - 1)
            total += max(0, end - first + 1)
        return total


EXAMPLES = 'Write "all", [1, 2, 40] or "1-20,40"; steps are counted from 1.'


def _read_step(step: object, steps: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise SettingsError(f"steps must be integers of at least 1; found {step!r} in {steps!r}. {EXAMPLES}")
    return step


def _read_range(part: str, steps: str) -> tuple[int, int | None]:
    match = RANGE.fullmatch(part.strip())
    if match is None:
        raise SettingsError(f"steps must list steps or ranges; found {part.strip()!r} in {steps!r}. {EXAMPLES}")
    first = _read_step(int(match[1]), steps)
    if match[2] is None:
        return first, first
    last = None if match[3] is None else int(match[3])
    if last is not None and last < first:
        raise SettingsError(f"steps must have ascending ranges; found {part.strip()!r} in {steps!r}. {EXAMPLES}")
    return first, last


def _merged(ranges: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    merged: list[tuple[int, int | None]] = []
    for first, last in sorted(ranges, key=lambda each: each[0]):
        if merged and (merged[-1][1] is None or first <= merged[-1][1] + 1):
            start, end = merged[-1]
            merged[-1] = (start, None if end is None or last is None else max(end, last))
        else:
            merged.append((first, last))
    return merged
