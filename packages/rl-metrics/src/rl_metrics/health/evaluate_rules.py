"""Evaluation of rule conditions on a run's metrics."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_metrics.health.checks import KINDS, WITH_GAPS, Measured, num_lost
from rl_metrics.health.finding import Evidence
from rl_metrics.health.rules import Condition, Rule, is_pattern, pattern_of
from rl_metrics.health.running import Floats
from rl_metrics.run_files.history import History

MAX_POINTS = 4000
"""Maximum number of judged points of a series; the middle of a longer one is thinned."""

MOST_LOST = 5
"""Number of newest steps without a metric after which it is no longer judged."""

NUM_FIRST = 500
NUM_NEWEST = 2500


class _Figure(float):
    """A number as shown in findings: `{value}` has four digits, `{value:share}` is in percent."""

    def __format__(self, spec: str) -> str:
        if spec == "share":
            return f"{100 * self:.3g} %"
        return f"{float(self):.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """Result of a condition for one metric.

    Attributes:
        condition: The condition.
        metric: Name of its first column, or of the match of a pattern.
        steps: [n] int64, steps at which all columns are finite.
        limits: Limits by name, as numbers.
        window: Window in steps.
        measured: Result of the check at these steps.
        num_lost: Number of newest steps without the metric, if nearly all before them had it.
    """

    condition: Condition
    metric: str
    steps: NDArray[np.int64]
    limits: dict[str, float]
    window: int
    measured: Measured
    num_lost: int = 0

    @property
    def is_old(self) -> bool:
        """Whether its data is too old to judge the present."""
        return self.num_lost >= MOST_LOST and self.condition.kind not in WITH_GAPS

    @property
    def is_wrong(self) -> bool:
        """Whether the newest step is wrong."""
        return bool(self.measured.is_wrong[-1])

    @property
    def since_step(self) -> int:
        """First step of the wrong stretch that ends at the newest step."""
        right = np.flatnonzero(~self.measured.is_wrong)
        return int(self.steps[right[-1] + 1 if len(right) else 0])

    @property
    def evidence(self) -> Evidence:
        """The measured value, in words."""
        value, before = float(self.measured.values[-1]), _Figure(self.measured.before or 0.0)
        figures = {name: _Figure(limit) for name, limit in self.limits.items()}
        window = min(self.window, len(self.steps))
        text = self.condition.says.format(
            metric=self.metric, window=window, value=_Figure(value), before=before, **figures
        )
        return Evidence(metric=self.metric, text=text, value=value)

    @property
    def reading(self) -> str:
        """Text for the checklist if nothing is wrong, or if the data is too old."""
        if self.is_old:
            return f"{self.metric} is missing or not finite in the last {self.num_lost} steps"
        return self.evidence.text


class RuleEvaluator:
    """Evaluates conditions on one run and caches the results."""

    def __init__(self, history: History, *, is_over: bool = False) -> None:
        """Start without results; conditions for the end of a run are false unless it is over."""
        self.is_over = is_over
        self._history = history
        self._columns: dict[str, Floats] = {}
        self._rows: dict[tuple[str, ...], NDArray[np.intp]] = {}
        self._found: dict[int, list[ConditionResult]] = {}

    def results(self, condition: Condition, rule: Rule) -> list[ConditionResult]:
        """Return a condition's results, one for each of its metrics that the run has."""
        if condition.at_end and not self.is_over:
            return []
        window = condition.window or rule.window
        limits = condition.limits_of(rule)
        results = []
        for metric, names in self._choices(condition):
            finite = self._finite(names)
            rows = self._rows_on(finite) if condition.kind in WITH_GAPS else finite
            if not len(rows):
                continue
            columns = tuple(self._column(name)[rows] for name in names)
            results.append(
                ConditionResult(
                    condition=condition,
                    metric=metric,
                    steps=self._history.steps[rows],
                    limits=limits,
                    window=window,
                    measured=KINDS[condition.kind](columns, limits, window),
                    num_lost=num_lost(self._column(metric)),
                )
            )
        return results

    def found(self, condition: Condition, rule: Rule) -> list[ConditionResult]:
        """Return the results of a condition that are wrong."""
        if id(condition) not in self._found:
            self._found[id(condition)] = [result for result in self.results(condition, rule) if result.is_wrong]
        return self._found[id(condition)]

    def excuse(self, broken: Condition, rule: Rule) -> str | None:
        """Return why a finding of one of the rule's conditions does not count, or None if it does."""
        for condition in (*broken.unless, *rule.unless):
            for result in self.found(condition, rule):
                return result.evidence.text
        for condition in rule.needs:
            if not self.results(condition, rule):
                return f"the run does not record {' or '.join(condition.reads[0])}"
            if not self.found(condition, rule):
                return condition.otherwise
        return None

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether the run has any of these metrics."""
        return bool(self._first_there(names))

    def _choices(self, condition: Condition) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the metric and the names of all columns; once, or once for each match of a pattern."""
        columns = [self._first_there(names) for names in condition.reads]
        if condition.can_do_with_one and not columns[-1]:
            columns.pop()
        if not all(columns):
            return
        patterns = [place for place, _ in enumerate(columns) if any(map(is_pattern, condition.reads[place]))]
        place = patterns[0] if patterns else 0
        for match in columns[place]:
            parts = {other: [name for name in columns[other] if name.startswith(f"{match}/")] for other in patterns[1:]}
            chosen = [[match] if other == place else parts.get(other, names) for other, names in enumerate(columns)]
            yield match, tuple(names[0] for names in chosen if names)

    def _first_there(self, names: tuple[str, ...]) -> list[str]:
        """Return the first name that the run has; for a pattern, all matches."""
        for name in names:
            if is_pattern(name):
                pattern = pattern_of(name)
                matches = sorted(metric for metric in self._history.values if pattern.fullmatch(metric))
                if matches:
                    return matches
            elif name in self._history.values:
                return [name]
        return []

    def _column(self, name: str) -> Floats:
        if name not in self._columns:
            self._columns[name] = self._history.values[name]
        return self._columns[name]

    def _rows_on(self, finite: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return all rows from the first finite one on, or without one from step 1 on, since step 0 only validates."""
        steps = self._history.steps
        return np.arange(finite[0] if len(finite) else np.searchsorted(steps, 1), len(steps))

    def _finite(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        if names not in self._rows:
            is_finite = np.isfinite(self._column(names[0]))
            for name in names[1:]:
                is_finite &= np.isfinite(self._column(name))
            self._rows[names] = _thinned(np.flatnonzero(is_finite))
        return self._rows[names]


def _thinned(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    if len(rows) <= MAX_POINTS:
        return rows
    middle = rows[NUM_FIRST:-NUM_NEWEST]
    stride = -(-len(middle) // (MAX_POINTS - NUM_FIRST - NUM_NEWEST))
    return np.concatenate([rows[:NUM_FIRST], middle[::stride], rows[-NUM_NEWEST:]])
