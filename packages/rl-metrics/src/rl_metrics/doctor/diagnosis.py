"""What the doctor says of a run."""

from dataclasses import dataclass
from typing import Literal

from rl_core.records import Json
from rl_metrics.health.finding import Evidence

Kind = Literal["hang", "stopped", "mismatch", "memory", "health"]
"""The run hangs, ended without an end, has engine and learner apart, grows in memory, or is not well otherwise."""

State = Literal["right", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run has an ailment.

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

    def to_json(self) -> dict[str, Json]:
        """As an object."""
        return {
            "name": self.name,
            "title": self.title,
            "share": self.share,
            "evidence": [evidence.to_json() for evidence in self.evidence],
            "advice": list(self.advice),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ailment:
    """Something that is wrong with a run.

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

    def to_json(self) -> dict[str, Json]:
        """As an object."""
        return {
            "kind": self.kind,
            "what": self.what,
            "evidence": [evidence.to_json() for evidence in self.evidence],
            "causes": [cause.to_json() for cause in self.causes],
            "against": [{"name": name, "text": text} for name, text in self.against],
            "details": list(self.details),
        }


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

    def to_json(self) -> dict[str, Json]:
        """As an object."""
        return {"kind": self.kind, "state": self.state, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong with a run and why, as far as its records tell.

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
        """As an object."""
        return {
            "run": self.run,
            "ailments": [ailment.to_json() for ailment in self.ailments],
            "readings": [reading.to_json() for reading in self.readings],
        }
