"""Health rules as data: conditions, thresholds, causes and advice."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_args

from rl_core.errors import SettingsError
from rl_core.record_fields import record
from rl_metrics.definitions.definition import Band
from rl_metrics.health.finding import Severity, Side

Family = Literal["policy_gradient", "distillation", "mixed"]
"""What a run learns from: rewards by a policy gradient, teachers, or both; some rules hold only for one."""

FAMILIES: tuple[Family, ...] = get_args(Family)
REWARDED: tuple[Family, ...] = ("policy_gradient", "mixed")
"""Families that learn from rewards, alone or with teachers."""

GRADIENT_ALONE: tuple[Family, ...] = ("policy_gradient",)
"""Families whose loss, gradients, entropy and lengths come only from a policy gradient."""

FAMILY_TEXTS: dict[Family, str] = {
    "policy_gradient": "a policy gradient",
    "distillation": "distillation",
    "mixed": "distillation with rewards",
}


def family_of(metrics: Collection[str], settings: Mapping[str, Any]) -> Family:
    """Return the family of a recorded run.

    Args:
        metrics: Names of its metrics; only runs with teachers have actor/distillation/*.
        settings: Settings of the run, as tables; without them, a run with teachers counts as distillation alone.
    """
    if not any(name.startswith("actor/distillation/") for name in metrics):
        return "policy_gradient"
    distillation = settings.get("distillation")
    is_mixed = isinstance(distillation, Mapping) and distillation.get("use_task_rewards") is True
    return "mixed" if is_mixed else "distillation"


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
        says: What was measured, with `{value}`, `{before}`, `{metric}`, its `{unit}` and the limits by name; of a
            rule's own conditions, true with and without a finding.
        needs: Conditions that must be true too; for a rule's own conditions.
        unless: Conditions; any true one excuses this condition, beside the rule's; for a rule's own conditions.
        otherwise: Text if the condition is false; for a rule's `needs`.
        optional_last: Whether the last column is optional.
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
    optional_last: bool = False
    at_end: bool = False

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        """The required columns."""
        return self.reads[:-1] if self.optional_last else self.reads

    def limits_of(self, rule: "Rule") -> dict[str, float]:
        """Return the limits of this condition as numbers, for use in a rule."""
        thresholds = {threshold.name: threshold.default for threshold in rule.thresholds}
        limits = {name: thresholds[limit] if isinstance(limit, str) else limit for name, limit in self.limits.items()}
        return limits or thresholds


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
    _require(chosen, known, what="threshold")

    def set_by_user(rule: Rule, threshold: Threshold) -> Threshold:
        value = chosen.get(f"{rule.name}.{threshold.name}")
        return threshold if value is None else replace(threshold, default=float(value), source="chosen by you")

    return tuple(
        replace(rule, thresholds=tuple(set_by_user(rule, threshold) for threshold in rule.thresholds)) for rule in rules
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
    conditions: list[Condition] = []
    for rule in rules:
        signs = (cause.sign for cause in rule.causes if cause.sign)
        for condition in (*rule.conditions, *rule.needs, *rule.unless, *rule.idle, *signs):
            conditions += [condition, *condition.needs, *condition.unless]
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
    _require(names, [*also, *(rule.name for rule in rules)], what="health rule")


def _require(names: Iterable[str], known: list[str], *, what: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"known: {', '.join(known)}"
            raise SettingsError(f"there is no {what} {name!r}; {hint}.")
