"""Options of a skip cache; settings can nest them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from rl_core.errors import SettingsError
from rl_rollout.skip.steps import StepSelection

Action = Literal["cache", "repeat", "repeat_last"]
OnMismatch = Literal["error", "regenerate", "accept"]
Rewards = Literal["stored", "again"]
OnBroken = Literal["regenerate", "error"]
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE | re.ASCII)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipOptions:
    """Whether rollouts are stored, and given back in place of new ones.

    Attributes:
        enabled: False generates every step's rollouts, and stores none.
        directory: Where entries are kept, one folder each: a local path, or a URL that fsspec knows, such as
            "s3://bucket/rollouts". Several runs can share it.
        steps: Steps that the cache serves: "all", a list, or ranges such as "1-20,40". The others run normally.
        action: "cache": a stored step is loaded, a missing one is generated and stored. "repeat": a step without an
            entry of its own takes the stored ones in turn. "repeat_last": it takes the newest stored one. Both generate
            and store where there is none yet.
        on_mismatch: When an entry was made with another policy, other prompts or other settings (repeat and
            repeat_last: with another tokenizer or other columns): "error", "regenerate" the step, or "accept" the
            entry.
        on_broken: When an entry is torn or no entry: "regenerate" (it is set aside, and the step is generated), or
            "error".
        rewards: Of what is replayed: "stored" takes those of the entry; "again" lets the trainer ask the reward
            functions of now, and a reward that changed is no mismatch.
        max_bytes: Most bytes of all entries together, a number or a size such as "20G"; the oldest go first. It must
            hold all steps that are to be replayed. None has no limit.
        compress: Store with lz4, in about half the bytes; False reads and writes a little faster.
        validation: Store and replay validation too, each for its own step alone, and only where nothing differs.
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
            ValueError: It is no size.
        """
        if self.max_bytes is None:
            return None
        if isinstance(self.max_bytes, int) and not isinstance(self.max_bytes, bool):
            return self.max_bytes
        return parse_bytes(str(self.max_bytes))

    def problems(self) -> Iterator[str]:
        """What cannot be: each names the option, what it must be, and what it is."""
        for name, known in (
            ("action", Action),
            ("on_mismatch", OnMismatch),
            ("on_broken", OnBroken),
            ("rewards", Rewards),
        ):
            found, values = getattr(self, name), get_args(known)
            if found not in values:
                yield f"{name} must be one of {', '.join(map(repr, values))}; found {found!r}."
        if not isinstance(self.directory, str) or not self.directory or "\0" in self.directory:
            yield f"directory must name a folder or a URL; found {self.directory!r}."
        try:
            if self.max_size_bytes is not None and self.max_size_bytes < 1:
                yield f"max_bytes must be at least 1, or none; found {self.max_bytes!r}."
        except ValueError as error:
            yield f"max_bytes: {error}."
        try:
            StepSelection.parse(self.steps)
        except SettingsError as error:
            yield str(error)

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            SettingsError: Has all of `problems`.
        """
        if found := list(self.problems()):
            raise SettingsError("\n".join(found))


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "500M", "1.5GB" or "20Gi"; k, M, G and T count in thousands, Ki, Mi, Gi, Ti in 1024s.

    Raises:
        ValueError: It is no size.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a size such as 500000, 500M, 1.5GB or 20Gi was expected; found {text!r}")
    base = 1024 if match[3] else 1000
    unit: int = base ** POWERS[(match[2] or "").lower()]
    return round(float(match[1]) * unit)
