"""Health rules as data: conditions, thresholds, causes and advice."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache

from rl_core.errors import SettingsError
from rl_core.record_fields import record
from rl_metrics.health.families import FAMILIES, Family
from rl_metrics.health.finding import Severity, Side


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that a user can set.

    Attributes:
        name: Such as "max"; users write it after the rule's name: "kl_high.max".
        default: Unless the user sets it.
        meaning: What it bounds, with its unit.
        source: Who says so.
    """

    name: str
    default: float
    meaning: str
    source: str


@record
class Condition:
    """One look at some metrics.

    Attributes:
        kind: Name of a check in `checks.KINDS`.
        reads: One column each: names of metrics; the first that the run has is used. One with `*` (anything) or
            `#` (digits) stands for all that match, each judged alone; a later column with such is the part of each,
            `metric/...`.
        limits: By the check's name for them: a number, or the name of one of the rule's thresholds. None at all takes
            every threshold of the rule by its own name.
        window: Steps; 0 takes the rule's.
        min_steps: Of a rule's own condition: steps with its metrics, where it takes more than the rule.
        says: How a finding's evidence puts it, with `{value}`, `{before}`, `{metric}` and the limits by name.
        well: How the checklist puts it where nothing is found, with `{newest}` too, the metric's newest median; left
            out, it has just that.
        needs: Of a rule's own condition: it finds nothing unless each of these finds something too.
        otherwise: Of a rule's `needs`: how it is put that it finds nothing.
        can_do_with_one: It does without its last column where the run has none of it.
    """

    kind: str
    reads: tuple[tuple[str, ...], ...]
    limits: Mapping[str, float | str] = field(default_factory=dict)
    window: int = 0
    min_steps: int = 0
    says: str = "{metric} is at {value}"
    well: str = ""
    needs: tuple["Condition", ...] = ()
    otherwise: str = ""
    can_do_with_one: bool = False

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        """The columns without which it sees nothing."""
        return self.reads[:-1] if self.can_do_with_one else self.reads

    def limits_of(self, rule: "Rule") -> dict[str, float]:
        """The limits of this condition, as numbers, where a rule looks with it."""
        limits = self.limits or {threshold.name: threshold.name for threshold in rule.thresholds}
        return {name: rule.limit(limit) if isinstance(limit, str) else limit for name, limit in limits.items()}


def condition(
    kind: str,
    *reads: str | tuple[str, ...],
    says: str = "{metric} is at {value}",
    well: str = "",
    window: int = 0,
    min_steps: int = 0,
    needs: tuple[Condition, ...] = (),
    otherwise: str = "",
    can_do_with_one: bool = False,
    **limits: float | str,
) -> Condition:
    """A `Condition` as rules write it: `condition("level", "actor/grad_norm", says="{metric} is at {value}", max=1.0)`.

    Args:
        kind: Name of a check in `checks.KINDS`.
        reads: One column each: a metric, or several; the first that the run has is used.
        says: See `Condition`, as all that follow.
        well: How it is put that all is well.
        window: Steps.
        min_steps: Minimum number of steps.
        needs: Others that have to find something too.
        otherwise: How it is put that it finds nothing.
        can_do_with_one: The last column may be missing.
        limits: By the check's name for them.
    """
    return Condition(
        kind=kind,
        reads=tuple((names,) if isinstance(names, str) else names for names in reads),
        limits=limits,
        window=window,
        min_steps=min_steps,
        says=says,
        well=well,
        needs=needs,
        otherwise=otherwise,
        can_do_with_one=can_do_with_one,
    )


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something may be wrong.

    Attributes:
        text: In one phrase.
        advice: What to try then.
        rule: A finding of this rule, no later than the one to explain, speaks for it: it comes first, and is named.
        sign: A condition that speaks for it where it finds something, and against it where it finds nothing.
    """

    text: str
    advice: str
    _: KW_ONLY
    rule: str | None = None
    sign: Condition | None = None


@record
class Rule:
    """One line of the checklist.

    Attributes:
        name: In snake_case.
        side: What it is about.
        title: What is checked, in some words.
        what: What is wrong, in one sentence.
        conditions: Any of them finds it.
        thresholds: What users can set.
        window: Steps that a condition looks at.
        min_steps: Steps with the metric before anything is said.
        severity: Of a finding.
        causes: Likeliest first.
        needs: Nothing is found unless each of these finds something too.
        unless: Nothing is found where one of these finds something.
        families: What a run has to learn from for it to mean anything.
        reasons: Name of the event whose error, of the newest one, is evidence beside what the conditions find.
        events: An event of this name whose error has this text, newer than the newest start of the run, finds it too.
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
    severity: Severity = "warning"
    needs: tuple[Condition, ...] = ()
    unless: tuple[Condition, ...] = ()
    families: tuple[Family, ...] = FAMILIES
    events: tuple[tuple[str, str], ...] = ()
    reasons: str = ""

    def limit(self, name: str) -> float:
        """A threshold's value.

        Raises:
            KeyError: It has none of this name.
        """
        for threshold in self.thresholds:
            if threshold.name == name:
                return threshold.default
        raise KeyError(name)


def with_thresholds(rules: Iterable[Rule], chosen: Mapping[str, float]) -> tuple[Rule, ...]:
    """The rules with a user's thresholds.

    Args:
        rules: All that there are.
        chosen: By rule and threshold, such as `{"kl_high.max": 0.05}`.

    Raises:
        SettingsError: There is no such threshold; the message has the nearest one.
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
    """The rules but those that a user switched off.

    Raises:
        SettingsError: There is no such rule; the message has the nearest one.
    """
    rules = tuple(rules)
    require_rules(rules, off)
    return tuple(rule for rule in rules if rule.name not in off)


def reads(rules: Iterable[Rule]) -> Callable[[str], bool]:
    """True for the names of metrics that any of the rules reads."""
    conditions = (
        condition
        for rule in rules
        for one in (*rule.conditions, *rule.needs, *rule.unless, *(cause.sign for cause in rule.causes if cause.sign))
        for condition in (one, *one.needs)
    )
    names = {name for condition in conditions for choices in condition.reads for name in choices}
    patterns = [pattern_of(name) for name in sorted(names) if is_pattern(name)]
    return lambda metric: metric in names or any(pattern.fullmatch(metric) for pattern in patterns)


def is_pattern(name: str) -> bool:
    """True for a name that stands for several metrics."""
    return "*" in name or "#" in name


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """What a name with `*` or `#` stands for."""
    return re.compile(re.escape(name).replace(r"\*", ".+").replace(r"\#", "[0-9]+"), re.DOTALL)


def require_rules(rules: Iterable[Rule], names: Iterable[str], *, also: tuple[str, ...] = ()) -> None:
    """Refuse names of rules that there are not.

    Args:
        rules: All that there are.
        names: To look up.
        also: Words that are taken too, such as "critical".

    Raises:
        SettingsError: There is no such rule; the message has the nearest one.
    """
    known = [*also, *(rule.name for rule in rules)]
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no health rule {name!r}{_hint(name, known)}.")


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {near[0]!r}" if near else f"; known: {', '.join(known)}"
