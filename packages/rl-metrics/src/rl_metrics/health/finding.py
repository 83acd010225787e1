"""Types of a health verdict: checks, findings and the overall verdict."""

from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from rl_core.data import Json
from rl_core.errors import DataError
from rl_metrics.run_files.json_lines import as_plain

Side = Literal["task", "convergence", "stability", "efficiency"]
"""Subject of a rule: learning the task, movement of the policy, stability, or use of time and memory."""

Severity = Literal["warning", "critical"]

Status = Literal["ok", "warning", "critical", "unknown"]
"""Result of a check; "unknown" if the run has too few steps or lacks its metrics."""

SIDE_TITLES: dict[Side, str] = {
    "task": "Task: does the policy learn what is rewarded",
    "convergence": "Convergence: does the policy move, in steps of moderate size",
    "stability": "Stability: is the training data sound, and do engine and learner agree",
    "efficiency": "Efficiency: use of time and memory",
}
SEVERITY_RANKS: dict[Status, int] = {"unknown": 0, "ok": 0, "warning": 1, "critical": 2}
"""Severity of each status as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One reason for a finding.

    Attributes:
        metric: Name of the metric or event that shows it.
        text: A sentence with the values.
        value: The measured value; None if it is not one finite number.
    """

    metric: str
    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A health problem of a run.

    Attributes:
        rule: Name of the rule that found it.
        side: Side of the rule.
        severity: Severity of the problem.
        what: The problem in one sentence.
        since_step: First step of the stretch, up to the newest step, in which it holds.
        evidence: Values of the run's metrics, the rule's own first.
        causes: Likely causes, most likely first.
        advice: What to try, one entry per cause.
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
    """A line of the checklist: a rule and its result. Problems are in the verdict's findings.

    Attributes:
        rule: Name of the rule.
        side: Side of the rule.
        title: Short description of the check.
        status: Result of the check.
        reading: Values of the metrics, such as "0.012 nats over the last 10 steps", or why they are unknown.
        applies: Whether the rule can be judged for what the run learns from and records, with enough steps.
        excuse: Why values beyond the thresholds are accepted; empty if none are.
    """

    rule: str
    side: Side
    title: str
    status: Status
    reading: str
    applies: bool = True
    excuse: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetVerdict:
    """Whether validation has reached the run's target.

    Attributes:
        metric: Name of the metric.
        value: Value to reach.
        lower_is_better: Whether the metric should fall to the value.
        is_reached: Whether any validation has reached it.
        reached_at_step: Step of the first such validation.
        best: Best value so far; None before the first validation.
        best_step: Step of the best validation.
        text: The verdict in words.
    """

    metric: str
    value: float
    lower_is_better: bool
    is_reached: bool
    reached_at_step: int | None
    best: float | None
    best_step: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Health of a run at a step.

    Attributes:
        status: Worst status of the checks; "unknown" if all checks are unknown.
        step: Newest step of the run; 0 without one.
        checks: One check per rule, by side.
        findings: Problems, ordered so that findings that explain others come first.
        target: Whether validation has reached the run's target; None without one.
    """

    status: Status
    step: int
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    target: TargetVerdict | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the verdict as a JSON object, as in health.json; values that are not finite are null."""
        document: dict[str, Json] = as_plain(msgspec.to_builtins(self))
        return document

    @classmethod
    def from_json(cls, row: object) -> Self:
        """Create a verdict from an object of `to_json`.

        Raises:
            DataError: The object is not a verdict.
        """
        try:
            return msgspec.convert(row, cls)
        except (msgspec.ValidationError, OverflowError, RecursionError) as error:
            raise DataError(f"a verdict must be an object of Verdict.to_json; {error}.") from None
