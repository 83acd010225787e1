"""Health rules as data: conditions, thresholds, causes and advice."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cache
from typing import Any

from rl_core.errors import SettingsError
from rl_core.record_fields import record
from rl_metrics.definitions.definition import Band
from rl_metrics.health.families import FAMILIES, Family
from rl_metrics.health.finding import Severity, Side


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit that a user can override.

    Attributes:
        name: Name within the rule, such as "max"; users write "kl_high.max".
        default: Value unless overridden.
        meaning: What it bounds, with its unit.
        source: Source of the value.
    """

    name: str
    default: float
    meaning: str
    source: str


def from_band(band: Band, meaning: str, *, prefix: str = "") -> tuple[Threshold, ...]:
    """Return thresholds "min" and "max" for the ends of a healthy range, after a prefix."""
    ends = (("min", band.low), ("max", band.high))
    return tuple(Threshold(prefix + name, end, meaning, band.source) for name, end in ends if end is not None)


@record
class Condition:
    """A check of some metrics.

    Attributes:
        kind: Name of a check in `checks.KINDS`.
        reads: Alternative metric names for each column; the first that the run has is used. A name with `*` (anything)
            or `#` (digits) stands for all matches, each judged separately; a pattern in a later column matches parts of
            each, `metric/...`.
        limits: Limits by the check's name for them: numbers, or names of the rule's thresholds. Empty uses every
            threshold of the rule by its own name.
        window: Window in steps; 0 uses the rule's.
        min_steps: Minimum number of steps with the metrics, if more than the rule's; for a rule's own conditions.
        says: What was measured, with `{value}`, `{before}`, `{metric}` and the limits by name; of a rule's own
            conditions, true with and without a finding.
        needs: Conditions that must be true too; for a rule's own conditions.
        unless: Conditions; any true one excuses this condition, beside the rule's; for a rule's own conditions.
        otherwise: Text if the condition is false; for a rule's `needs`.
        can_do_with_one: Whether the last column is optional.
        at_end: Whether the condition is for the end of a run only; for a rule's own conditions.
    """

    kind: str
    reads: tuple[tuple[str, ...], ...]
    limits: Mapping[str, float | str] = field(default_factory=dict)
    window: int = 0
    min_steps: int = 0
    says: str = "{metric} is at {value}"
    needs: tuple["Condition", ...] = ()
    unless: tuple["Condition", ...] = ()
    otherwise: str = ""
    can_do_with_one: bool = False
    at_end: bool = False

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        """The required columns."""
        return self.reads[:-1] if self.can_do_with_one else self.reads

    def limits_of(self, rule: "Rule") -> dict[str, float]:
        """Return the limits of this condition as numbers, for use in a rule."""
        limits = self.limits or {threshold.name: threshold.name for threshold in rule.thresholds}
        return {name: rule.limit(limit) if isinstance(limit, str) else limit for name, limit in limits.items()}


def condition(kind: str, *reads: str | tuple[str, ...], **options: Any) -> Condition:
    """Return a `Condition` in short form, such as `condition("level", "actor/grad_norm", max=1.0)`.

    Args:
        kind: Name of a check in `checks.KINDS`.
        reads: Metric, or alternatives, for each column; the first that the run has is used.
        options: Other fields of the condition; all further names are limits.
    """
    known = {field.name for field in fields(Condition)}
    limits = {name: limit for name, limit in options.items() if name not in known}
    columns = tuple((names,) if isinstance(names, str) else names for names in reads)
    others = {name: value for name, value in options.items() if name in known}
    return Condition(kind=kind, reads=columns, limits=limits, **others)


@dataclass(frozen=True, slots=True)
class Cause:
    """A possible cause of a finding.

    Attributes:
        text: Description in one phrase.
        advice: What to try.
        rule: Rule whose finding, if not later, supports this cause and moves it to the front.
        sign: Condition that supports this cause if true, and rules it out if false.
    """

    text: str
    advice: str
    _: KW_ONLY
    rule: str | None = None
    sign: Condition | None = None


@record
class Rule:
    """A health rule, which is one line of the checklist.

    Attributes:
        name: Name in snake_case.
        side: Side of the checklist.
        title: Short description of the check.
        what: The problem in one sentence.
        conditions: Conditions; any true one makes a finding.
        thresholds: Limits that users can override.
        window: Window of the conditions, in steps.
        min_steps: Minimum number of steps with the metric.
        sure_steps: Number of steps with the metric from which the result is sure; with fewer, the check says so.
        severity: Severity of a finding.
        causes: Possible causes, most likely first.
        needs: Conditions that must all be true for a finding.
        unless: Conditions; any true one prevents a finding.
        idle: Conditions; any true one means that the rule cannot be judged.
        holds: Runs for which the thresholds hold, if not for all of the families.
        families: Families of runs that the rule applies to.
        reasons: Name of an event; the error of the newest one is added to the evidence.
        events: Pairs of event name and error text; such an event since the newest start of the run is a finding too.
    """

    name: str
    side: Side
    title: str
    what: str
    conditions: tuple[Condition, ...]
    thresholds: tuple[Threshold, ...]
    causes: tuple[Cause, ...]
    window: int = 10
    min_steps: int = 10
    sure_steps: int = 0
    severity: Severity = "warning"
    needs: tuple[Condition, ...] = ()
    unless: tuple[Condition, ...] = ()
    idle: tuple[Condition, ...] = ()
    holds: str = ""
    families: tuple[Family, ...] = FAMILIES
    events: tuple[tuple[str, str], ...] = ()
    reasons: str = ""

    def limit(self, name: str) -> float:
        """Return a threshold's value.

        Raises:
            KeyError: The rule has no threshold of this name.
        """
        for threshold in self.thresholds:
            if threshold.name == name:
                return threshold.default
        raise KeyError(name)


def with_thresholds(rules: Iterable[Rule], chosen: Mapping[str, float]) -> tuple[Rule, ...]:
    """Return the rules with a user's thresholds.

    Args:
        rules: All rules.
        chosen: Values by rule and threshold, such as `{"kl_high.max": 0.05}`.

    Raises:
        SettingsError: A threshold does not exist; the message suggests the nearest one.
    """
    rules = tuple(rules)
    known = [f"{rule.name}.{threshold.name}" for rule in rules for threshold in rule.thresholds]
    for name in chosen:
        if name not in known:
            raise SettingsError(f"there is no threshold {name!r}{_hint(name, known)}.")
    return tuple(
        replace(
            rule,
            thresholds=tuple(
                replace(one, default=float(chosen[f"{rule.name}.{one.name}"]), source="chosen by you")
                if f"{rule.name}.{one.name}" in chosen
                else one
                for one in rule.thresholds
            ),
        )
        for rule in rules
    )


def without(rules: Iterable[Rule], off: Collection[str]) -> tuple[Rule, ...]:
    """Return the rules without those that a user turned off.

    Raises:
        SettingsError: A rule does not exist; the message suggests the nearest one.
    """
    rules = tuple(rules)
    require_rules(rules, off)
    return tuple(rule for rule in rules if rule.name not in off)


def reads(rules: Iterable[Rule]) -> Callable[[str], bool]:
    """Return a predicate that is True for the names of metrics read by any of the rules."""
    conditions = (
        condition
        for rule in rules
        for one in (
            *rule.conditions,
            *rule.needs,
            *rule.unless,
            *rule.idle,
            *(cause.sign for cause in rule.causes if cause.sign),
        )
        for condition in (one, *one.needs, *one.unless)
    )
    names = {name for condition in conditions for choices in condition.reads for name in choices}
    patterns = [pattern_of(name) for name in sorted(names) if is_pattern(name)]
    return lambda metric: metric in names or any(pattern.fullmatch(metric) for pattern in patterns)


def is_pattern(name: str) -> bool:
    """Return True if a name stands for several metrics."""
    return "*" in name or "#" in name


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """Compile a name with `*` or `#` to a pattern."""
    return re.compile(re.escape(name).replace(r"\*", ".+").replace(r"\#", "[0-9]+"), re.DOTALL)


def require_rules(rules: Iterable[Rule], names: Iterable[str], *, also: tuple[str, ...] = ()) -> None:
    """Refuse unknown names of rules.

    Args:
        rules: All rules.
        names: Names to check.
        also: Further accepted words, such as "critical".

    Raises:
        SettingsError: A rule does not exist; the message suggests the nearest one.
    """
    known = [*also, *(rule.name for rule in rules)]
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no health rule {name!r}{_hint(name, known)}.")


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {near[0]!r}" if near else f"; known: {', '.join(known)}"
