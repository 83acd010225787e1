"""Types of the doctor's report."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from rl_core.data import Json
from rl_metrics.health.finding import Evidence
from rl_metrics.run_files.json_lines import as_plain

Kind = Literal["hang", "stopped", "mismatch", "memory", "health"]
"""Hang, silent end, mismatch of engine and learner, memory growth, or another health problem."""

State = Literal["right", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of a problem.

    Attributes:
        name: Constant name, such as "stale_weights".
        title: Short description.
        share: Share of the problem that it accounts for, from 0 to 1; None if that has no meaning.
        evidence: Evidence for it.
        advice: What to try, in order.
    """

    name: str
    title: str
    share: float | None = None
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A problem of a run.

    Attributes:
        kind: Kind of the problem.
        what: Description in one sentence.
        evidence: Evidence that it exists, and of its size.
        causes: Likely causes, most likely first.
        details: Further lines, such as stacks.
    """

    kind: Kind
    what: str
    evidence: tuple[Evidence, ...] = ()
    causes: tuple[Cause, ...] = ()
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFinding:
    """Result of a check that found no problem, or could not be made.

    Attributes:
        kind: Kind of the problem.
        state: "right" if there is no problem; "unknown" if the data was not recorded.
        text: What was measured, or what is missing.
    """

    kind: Kind
    state: State
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Problems of a run and their causes, according to its records.

    Attributes:
        run: Name of the run.
        diagnoses: Problems; those that stop a run come first.
        no_findings: Checks without a problem.
    """

    run: str
    diagnoses: tuple[Diagnosis, ...] = ()
    no_findings: tuple[NoFinding, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the report as a JSON object; values that are not finite are null."""
        document: dict[str, Json] = as_plain(msgspec.to_builtins(self))
        return {"run": document["run"], "ailments": document["diagnoses"], "readings": document["no_findings"]}
