"""Options of a rollout cache, and the steps that it covers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record

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


Action = Literal["cache", "repeat", "repeat_last"]
OnMismatch = Literal["error", "regenerate", "accept"]
Rewards = Literal["stored", "again"]
OnBroken = Literal["regenerate", "error"]
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE | re.ASCII)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@settings_record
class SkipOptions:
    """Store rollouts, and replay them instead of generating new ones.

    Attributes:
        enabled: Use the cache. false generates every step's rollouts and stores none.
        directory: Folder of the cache: a local path, relative to where the run is started, or a URL that fsspec
            supports, such as "s3://bucket/rollouts". Several runs can share it.
        steps: Steps that use the cache: "all", a list, or ranges such as "1-20,40". Other steps run normally.
        action: "cache" replays a stored step; it generates and stores a missing one. "repeat" does so for `steps`, such
            as "1-3", and every later step replays these in order. "repeat_last" replays the newest entry for a step
            that is missing; it generates and stores if the cache is empty.
        on_mismatch: What to do with an entry from another policy, other prompts or other settings (for repeat and
            repeat_last: another tokenizer or other columns): "error", "regenerate" the step, or "accept" the entry.
        on_broken: What to do with a damaged or invalid entry: "regenerate" (move it to broken/ and generate the step)
            or "error".
        rewards: "stored" replays the stored rewards. "again" calls the current reward functions on the stored
            responses; a changed reward is then not a mismatch.
        max_bytes: Maximum size of all entries, in bytes or as a size such as "20G"; the oldest are deleted first. It
            must hold every step to be replayed. none sets no limit.
        compress: Compress with lz4, to about half the size; false reads and writes slightly faster.
        validation: Also store and replay validation, but only for the same step with identical settings. Only in
            synchronous runs.
    """

    enabled: bool = False
    directory: str = "skip-cache"
    steps: str | int | list[int] = "all"
    action: Action = "cache"
    on_mismatch: OnMismatch = "error"
    on_broken: OnBroken = "regenerate"
    rewards: Rewards = "stored"
    max_bytes: int | str | None = None
    compress: bool = True
    validation: bool = False

    @property
    def max_size_bytes(self) -> int | None:
        """`max_bytes` as a number.

        Raises:
            ValueError: `max_bytes` is not a size.
        """
        if self.max_bytes is None:
            return None
        return self.max_bytes if isinstance(self.max_bytes, int) else parse_bytes(self.max_bytes)

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid option: its name, the expected value and the actual one."""
        if not self.directory or "\0" in self.directory:
            yield f"directory must name a folder or a URL; found {self.directory!r}."
        try:
            if self.max_size_bytes is not None and self.max_size_bytes < 1:
                yield f"max_bytes must be at least 1, or none; found {self.max_bytes!r}."
        except ValueError as error:
            yield f"max_bytes: {error}."
        try:
            steps = StepSelection.parse(self.steps)
        except SettingsError as error:
            yield str(error)
        else:
            if self.action == "repeat" and steps.last is None:
                yield (
                    'action = "repeat" needs steps with an end, because later steps repeat them; found steps = '
                    f'{self.steps!r}. Set steps = "1-3" to repeat the first three.'
                )

    def check(self) -> None:
        """Check the options.

        Raises:
            SettingsError: An option is invalid; the message lists all `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


def parse_bytes(text: str) -> int:
    """Parse a size such as "500M", "1.5GB" or "20Gi" into bytes; k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024.

    Raises:
        ValueError: The text is not a size.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a size such as 500000, 500M, 1.5GB or 20Gi; found {text!r}")
    base = 1024 if match[3] else 1000
    unit: int = base ** POWERS[(match[2] or "").lower()]
    return round(float(match[1]) * unit)
