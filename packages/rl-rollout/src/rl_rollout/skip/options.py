"""Options of a skip cache; settings can nest them."""

import re
from collections.abc import Iterator
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.skip.steps import StepSelection

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
