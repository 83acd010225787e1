"""Types of a health verdict: checks, findings and the overall verdict."""

from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from rl_core.data import Json
from rl_core.errors import DataError
from rl_metrics.run_files.json_lines import as_plain

Side = Literal["task", "convergence", "stability", "efficiency"]
"""What a rule looks at: does it learn the task, does the policy move well, is it stable, is the time well spent."""

Severity = Literal["warning", "critical"]

Status = Literal["ok", "warning", "critical", "unknown"]
"""What a check came to; unknown when the run has too few steps for it, or lacks its metrics."""

SIDE_TITLES: dict[Side, str] = {
    "task": "Task: does it learn what it is rewarded for",
    "convergence": "Convergence: does the policy move, and not too far at a time",
    "stability": "Stability: is what trains sound, and are engine and learner one policy",
    "efficiency": "Efficiency: where time and memory go",
}
SEVERITY_RANKS: dict[Status, int] = {"unknown": 0, "ok": 0, "warning": 1, "critical": 2}
"""How bad a status is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One reason for a finding.

    Attributes:
        metric: Name of the metric, or of the event, that shows it.
        text: A sentence with the figures.
        value: The figure itself; None where it is not one finite number.
    """

    metric: str
    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A health problem of a run.

    Attributes:
        rule: Name of the rule that found it.
        side: Of the rule.
        severity: How bad it is.
        what: What is wrong, in one sentence.
        since_step: First step from which it holds up to the newest.
        evidence: Figures of the run's metrics, the rule's own first.
        causes: Likely causes, the likeliest first.
        advice: What to try, one for each cause.
        because: Rules whose findings explain this one.
    """

    rule: str
    side: Side
    severity: Severity
    what: str
    since_step: int
    evidence: tuple[Evidence, ...]
    causes: tuple[str, ...]
    advice: tuple[str, ...]
    because: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A rule and what it came to: a line of the checklist. What is wrong is in the verdict's findings.

    Attributes:
        rule: Name of the rule.
        side: Of the rule.
        title: What is checked, in some words.
        status: What came of it.
        reading: What the metrics say, such as "0.012 nats over the last 10 steps"; or why nothing is known.
    """

    rule: str
    side: Side
    title: str
    status: Status
    reading: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run is healthy at a step.

    Attributes:
        status: The worst of the checks; "unknown" when no check could say anything.
        step: Newest step of the run; 0 without one.
        checks: One for each rule, by side.
        findings: What is wrong, ordered so that what explains others comes first.
    """

    status: Status
    step: int
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Json]:
        """As an object: what health.json has; a value that is not finite is null."""
        document: dict[str, Json] = as_plain(msgspec.to_builtins(self))
        return document

    @classmethod
    def from_json(cls, row: object) -> Self:
        """What `to_json` gave.

        Raises:
            DataError: The row is something else, or a check's status contradicts the findings.
        """
        try:
            verdict = msgspec.convert(row, cls)
        except (msgspec.ValidationError, OverflowError, RecursionError) as error:
            raise DataError(f"a verdict must be as Verdict.to_json gives it; found another: {error}.") from None
        severities = {finding.rule: finding.severity for finding in verdict.findings}
        for check in verdict.checks:
            if severities.get(check.rule) != (check.status if SEVERITY_RANKS[check.status] else None):
                raise DataError(
                    f"check {check.rule!r} has the status {check.status!r}, which its finding, or having none, "
                    "contradicts."
                )
        return verdict
