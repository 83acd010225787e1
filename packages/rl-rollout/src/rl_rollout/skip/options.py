"""Options of a skip cache; settings can nest them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from rl_core.errors import SettingsError
from rl_rollout.skip.steps import StepSelection

Action = Literal["cache", "repeat", "repeat_last"]
OnMismatch = Literal["error", "regenerate", "accept"]
Rewards = Literal["stored", "again"]
OnBroken = Literal["regenerate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipOptions:
    """Whether rollouts are stored, and given back in place of new ones.

    Attributes:
        enabled: False generates every step's rollouts, and stores none.
        directory: Where entries are kept, one folder each: a local path, or a URL that fsspec knows, such as
            "s3://bucket/rollouts". Several runs can share it.
        steps: Steps that the cache serves: "all", a list, or ranges such as "1-20,40". The others run normally.
        action: "cache": a stored step is loaded, a missing one is generated and stored. "repeat": a step without an
            entry takes the stored ones in turn. "repeat_last": it takes the newest stored one. Where there is none yet,
            both generate and store.
        on_mismatch: When an entry was made with another policy, other prompts or other settings (repeat and
            repeat_last: with another tokenizer or other columns): "error", "regenerate" the step, or "accept" the
            entry.
        on_broken: When an entry is torn or no entry: "regenerate" (it is set aside, and the step is generated), or
            "error".
        rewards: Of what is replayed: "stored" takes those of the entry; "again" asks the reward functions of now, and a
            reward that changed is then no mismatch.
        max_bytes: Most bytes of all entries together; the oldest go first. None has no limit.
        compress: Store with lz4, in about half the bytes; False reads and writes a little faster.
        validation: Store and replay validation too.
    """

    enabled: bool = False
    directory: str = "skip-cache"
    steps: str | list[int] = "all"
    action: Action = "cache"
    on_mismatch: OnMismatch = "error"
    on_broken: OnBroken = "regenerate"
    rewards: Rewards = "stored"
    max_bytes: int | None = None
    compress: bool = True
    validation: bool = False

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
        if not self.directory:
            yield "directory must name a folder or a URL; found ''."
        if self.max_bytes is not None and (isinstance(self.max_bytes, bool) or self.max_bytes < 1):
            yield f"max_bytes must be at least 1, or none; found {self.max_bytes!r}."
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
