"""What health says of a run: checks, findings, and the verdict of them all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar, get_args

from rl_core.errors import DataError
from rl_core.records import Json

Side = Literal["task", "convergence", "stability", "efficiency"]
"""What a rule looks at: does it learn the task, does the policy move well, is it stable, is the time well spent."""

Severity = Literal["warning", "critical"]

Status = Literal["ok", "warning", "critical", "unknown"]
"""What a check came to; unknown when the run has too few steps for it, or lacks its metrics."""

ChoiceT = TypeVar("ChoiceT", bound=str)

SIDES: tuple[Side, ...] = get_args(Side)
RANKS: dict[Status, int] = {"unknown": 0, "ok": 0, "warning": 1, "critical": 2}
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

    def to_json(self) -> dict[str, Json]:
        """As an object; a value that is not finite is null."""
        value = self.value if self.value is not None and math.isfinite(self.value) else None
        return {"metric": self.metric, "text": self.text, "value": value}

    @classmethod
    def from_json(cls, row: object) -> Self:
        """What `to_json` gave.

        Raises:
            DataError: The row is something else.
        """
        fields = _Fields(row, of="evidence")
        return cls(metric=fields.text("metric"), text=fields.text("text"), value=fields.number("value"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong with a run.

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

    def to_json(self) -> dict[str, Json]:
        """As an object."""
        return {
            "rule": self.rule,
            "side": self.side,
            "severity": self.severity,
            "what": self.what,
            "since_step": self.since_step,
            "evidence": [evidence.to_json() for evidence in self.evidence],
            "causes": list(self.causes),
            "advice": list(self.advice),
            "because": list(self.because),
        }

    @classmethod
    def from_json(cls, row: object) -> Self:
        """What `to_json` gave.

        Raises:
            DataError: The row is something else.
        """
        fields = _Fields(row, of="a finding")
        return cls(
            rule=fields.text("rule"),
            side=fields.one_of("side", SIDES),
            severity=fields.one_of("severity", get_args(Severity)),
            what=fields.text("what"),
            since_step=fields.whole("since_step"),
            evidence=tuple(Evidence.from_json(part) for part in fields.many("evidence")),
            causes=fields.texts("causes"),
            advice=fields.texts("advice"),
            because=fields.texts("because") if fields.has("because") else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A rule and what it came to: a line of the checklist.

    Attributes:
        rule: Name of the rule.
        side: Of the rule.
        title: What is checked, in some words.
        status: What came of it.
        finding: What is wrong; None unless the status is "warning" or "critical".
        reading: What the metrics say, such as "0.012 nats over the last 10 steps"; or why nothing is known.
    """

    rule: str
    side: Side
    title: str
    status: Status
    finding: Finding | None
    reading: str

    def to_json(self) -> dict[str, Json]:
        """As an object, without the finding, which a verdict has in its own list."""
        return {
            "rule": self.rule,
            "side": self.side,
            "title": self.title,
            "status": self.status,
            "reading": self.reading,
        }


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
        """As an object: what health.json has."""
        return {
            "status": self.status,
            "step": self.step,
            "checks": [check.to_json() for check in self.checks],
            "findings": [finding.to_json() for finding in self.findings],
        }

    @classmethod
    def from_json(cls, row: object) -> Self:
        """What `to_json` gave.

        Raises:
            DataError: The row is something else.
        """
        fields = _Fields(row, of="a verdict")
        findings = tuple(Finding.from_json(part) for part in fields.many("findings"))
        by_rule = {finding.rule: finding for finding in findings}
        return cls(
            status=fields.one_of("status", get_args(Status)),
            step=fields.whole("step"),
            checks=tuple(_check(part, by_rule) for part in fields.many("checks")),
            findings=findings,
        )


def _check(row: object, findings: dict[str, Finding]) -> Check:
    fields = _Fields(row, of="a check")
    rule, status = fields.text("rule"), fields.one_of("status", get_args(Status))
    finding = findings.get(rule)
    if (finding.severity if finding else None) != (status if RANKS[status] else None):
        raise DataError(f"check {rule!r} has the status {status!r}, which its finding, or having none, contradicts.")
    return Check(
        rule=rule,
        side=fields.one_of("side", SIDES),
        title=fields.text("title"),
        status=status,
        finding=finding,
        reading=fields.text("reading"),
    )


class _Fields:
    """The fields of an object that anyone may have written."""

    def __init__(self, row: object, *, of: str) -> None:
        if not isinstance(row, dict):
            raise DataError(f"{of} must be an object; found {type(row).__name__}.")
        self._row = row
        self._of = of

    def text(self, name: str) -> str:
        value = self._row.get(name)
        if not isinstance(value, str):
            raise self._refused(name, "text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.many(name)
        if not all(isinstance(value, str) for value in values):
            raise self._refused(name, "a list of texts")
        return tuple(str(value) for value in values)

    def has(self, name: str) -> bool:
        return name in self._row

    def many(self, name: str) -> Sequence[object]:
        value = self._row.get(name)
        if not isinstance(value, list):
            raise self._refused(name, "a list")
        return value

    def whole(self, name: str) -> int:
        value = self._row.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(name, "a whole number")
        return value

    def number(self, name: str) -> float | None:
        value = self._row.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._refused(name, "a number or null")
        try:
            number = float(value)
        except OverflowError:
            raise self._refused(name, "a number that fits 64 bits") from None
        return number if math.isfinite(number) else None

    def one_of(self, name: str, allowed: tuple[ChoiceT, ...]) -> ChoiceT:
        value = self._row.get(name)
        for choice in allowed:
            if value == choice:
                return choice
        raise self._refused(name, f"one of {', '.join(allowed)}")

    def _refused(self, name: str, expected: str) -> DataError:
        found = repr(self._row.get(name))
        return DataError(f"{name} of {self._of} must be {expected}; found {found[:80]}.")
