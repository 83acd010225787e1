"""Options of a rollout cache, and the steps that it covers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record

RANGE = re.compile(r"0*([1-9]\d{0,17})(?:\s*-\s*(\d{0,18}))?", re.ASCII)
ENDLESS = 10**18
"""The last step of a range without an end."""
EXAMPLES = 'Write "all", [1, 2, 40] or "1-20,40"; steps are counted from 1.'


@dataclass(frozen=True, slots=True)
class StepSelection:
    """A set of steps, counted from 1.

    Attributes:
        ranges: Ranges of steps, sorted, and neither overlapping nor adjacent. One up to ENDLESS has no end.
    """

    ranges: tuple[range, ...]

    @classmethod
    def parse(cls, steps: str | int | Sequence[int]) -> "StepSelection":
        """Parse "all", one step, a list of steps, or ranges such as "1-20,40" and "100-".

        Raises:
            SettingsError: The value has another form, selects no step, or has a range that ends before it starts.
        """
        if isinstance(steps, str):
            text = steps.strip()
            in_brackets = text[:1] + text[-1:] == "[]"
            parts = ["1-"] if text == "all" else (text[1:-1] if in_brackets else text).split(",")
        else:
            parts = [str(step) for step in steps] if isinstance(steps, Sequence) else [str(steps)]
        merged: list[range] = []
        for each in sorted((_read_range(part.strip(), steps) for part in parts or [""]), key=lambda each: each.start):
            if merged and each.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(each.stop, merged[-1].stop))
            else:
                merged.append(each)
        return cls(tuple(merged))

    def __contains__(self, step: int) -> bool:
        return any(step in each for each in self.ranges)

    @property
    def first(self) -> int:
        """Return the first selected step."""
        return self.ranges[0].start

    @property
    def last(self) -> int:
        """Return the last selected step; ENDLESS if there is no end."""
        return self.ranges[-1].stop - 1

    def repeated(self, index: int) -> int:
        """Return the selected step with this index from 0, starting again after the last one."""
        index %= sum(map(len, self.ranges))
        for each in self.ranges:
            if index < len(each):
                break
            index -= len(each)
        return each[index]


def _read_range(part: str, steps: object) -> range:
    if match := RANGE.fullmatch(part):
        first, last = int(match[1]), match[2]
        found = range(first, (ENDLESS if last == "" else int(last or first)) + 1)
        if found:
            return found
    raise SettingsError(f"steps must be numbers from 1 or ascending ranges; found {part!r} in {steps!r}. {EXAMPLES}")


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
            if self.action == "repeat" and steps.last == ENDLESS:
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
