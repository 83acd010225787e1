"""Types of the doctor's diagnosis."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from rl_core.data import Json
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.json_lines import as_plain

Kind = Literal["hang", "stopped", "mismatch", "memory", "health"]
"""The run hangs, ended without an end, has engine and learner apart, grows in memory, or is not well otherwise."""

State = Literal["right", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of a problem.

    Attributes:
        name: Constant, such as "stale_weights".
        title: In some words.
        share: Of what is wrong that it accounts for, from 0 to 1; None where that is no share.
        evidence: What speaks for it.
        advice: What to try, in this order.
    """

    name: str
    title: str
    share: float | None = None
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ailment:
    """A problem of a run.

    Attributes:
        kind: Which.
        what: In a sentence.
        evidence: That it is there, and how bad it is.
        causes: The likeliest first.
        against: What speaks against causes that are not named, by their names.
        details: Lines that go with it, such as stacks.
    """

    kind: Kind
    what: str
    evidence: tuple[Evidence, ...] = ()
    causes: tuple[Cause, ...] = ()
    against: tuple[tuple[str, str], ...] = ()
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Something that was looked at and is not wrong, or could not be looked at.

    Attributes:
        kind: Which.
        state: "unknown" where what it needs was not recorded.
        text: What was seen, or what is missing.
    """

    kind: Kind
    state: State
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A run's problems and their causes, as far as its records show.

    Attributes:
        run: Its name.
        ailments: What keeps a run from going on comes first.
        readings: What else was looked at.
    """

    run: str
    ailments: tuple[Ailment, ...] = ()
    readings: tuple[Reading, ...] = ()

    @property
    def first_cause(self) -> Cause | None:
        """The likeliest cause of the first ailment; None where nothing is wrong, or no cause is known."""
        return next((cause for ailment in self.ailments for cause in ailment.causes), None)

    def to_json(self) -> dict[str, Json]:
        """As an object; a value that is not finite is null."""
        document: dict[str, Json] = as_plain(msgspec.to_builtins(self))
        for ailment in document["ailments"]:
            ailment["against"] = [{"name": name, "text": text} for name, text in ailment["against"]]
        return document
