"""Evaluation of rule conditions on a run's metrics."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.health.checks import KINDS, WITH_GAPS, Measured, num_lost
from rl_metrics.health.finding import Evidence
from rl_metrics.health.rules import Condition, Rule, is_pattern, pattern_of
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
        return f"{100 * self:.3g} %" if spec == "share" else f"{float(self):.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """Result of a condition for one metric.

    Attributes:
        condition: The condition.
        rule: Its rule.
        metric: Name of its first column, or of the match of a pattern.
        steps: [n] int64, steps at which all columns are finite.
        measured: Result of the check at these steps.
        num_lost: Number of newest steps without the metric, if nearly all before them had it.
    """

    condition: Condition
    rule: Rule
    metric: str
    steps: NDArray[np.int64]
    measured: Measured
    num_lost: int = 0

    @property
    def num_needed(self) -> int:
        """How many steps with its metric the condition needs."""
        return max(self.rule.min_steps, self.condition.min_steps)

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
        """The measured value, in words, and how sure it is if it comes from few values."""
        definition = DEFINITIONS.find(self.metric)
        value, num_steps, num_sure = float(self.measured.values[-1]), len(self.steps), self.rule.sure_steps
        text = self.condition.says.format(
            metric=self.metric,
            unit="?" if definition is None else definition.unit,
            window=min(self.condition.window or self.rule.window, num_steps),
            value=_Figure(value),
            before=_Figure(self.measured.before or 0.0),
            **{name: _Figure(limit) for name, limit in self.condition.limits_of(self.rule).items()},
        )
        unsure = f" (unsure: {num_steps} of {num_sure} values)" if num_steps < num_sure else ""
        return Evidence(metric=self.metric, text=text + unsure, value=value)

    @property
    def reading(self) -> str:
        """Text for the checklist if nothing is wrong, or if the data is too old."""
        if self.is_old:
            return f"{self.metric} is missing or not finite in the last {self.num_lost} steps"
        return self.evidence.text


class RuleEvaluator:
    """Evaluates conditions on one run."""

    def __init__(self, history: History, *, is_over: bool = False) -> None:
        """Start without results; conditions for the end of a run are false unless it is over."""
        self.is_over = is_over
        self._history = history
        self._column = cache(history.values.__getitem__)
        self._finite = cache(self._finite_rows)
        self._wrong: dict[int, list[ConditionResult]] = {}

    def results(self, condition: Condition, rule: Rule) -> list[ConditionResult]:
        """Return a condition's results, one for each of its metrics that the run has."""
        if condition.at_end and not self.is_over:
            return []
        results = []
        for metric, names in self._choices(condition):
            rows = self._finite(names)
            if condition.kind in WITH_GAPS:  # from the first finite one on, or from step 1, since step 0 only validates
                steps = self._history.steps
                rows = np.arange(rows[0] if len(rows) else np.searchsorted(steps, 1), len(steps))
            if not len(rows):
                continue
            columns = tuple(self._column(name)[rows] for name in names)
            limits, window = condition.limits_of(rule), condition.window or rule.window
            results.append(
                ConditionResult(
                    condition=condition,
                    rule=rule,
                    metric=metric,
                    steps=self._history.steps[rows],
                    measured=KINDS[condition.kind](columns, limits, window),
                    num_lost=num_lost(self._column(metric)),
                )
            )
        return results

    def wrong(self, condition: Condition, rule: Rule) -> list[ConditionResult]:
        """Return the results of a condition that are wrong."""
        if id(condition) not in self._wrong:
            self._wrong[id(condition)] = [result for result in self.results(condition, rule) if result.is_wrong]
        return self._wrong[id(condition)]

    def excuse(self, broken: Condition, rule: Rule) -> str | None:
        """Return why a finding of one of the rule's conditions does not count, or None if it does."""
        for condition in (*broken.unless, *rule.unless):
            for result in self.wrong(condition, rule):
                return result.evidence.text
        for condition in rule.needs:
            if not self.results(condition, rule):
                return f"the run does not record {' or '.join(condition.reads[0])}"
            if not self.wrong(condition, rule):
                return condition.otherwise
        return None

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether the run has any of these metrics."""
        return bool(self._recorded(names))

    def _choices(self, condition: Condition) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the metric and the names of all columns; once, or once for each match of a pattern."""
        columns = [self._recorded(names) for names in condition.reads]
        if condition.optional_last and not columns[-1]:
            columns.pop()
        if not all(columns):
            return
        patterns = [index for index, _ in enumerate(columns) if any(map(is_pattern, condition.reads[index]))]
        first = patterns[0] if patterns else 0
        for match in columns[first]:
            parts = {index: [name for name in columns[index] if name.startswith(f"{match}/")] for index in patterns[1:]}
            chosen = [[match] if index == first else parts.get(index, names) for index, names in enumerate(columns)]
            yield match, tuple(names[0] for names in chosen if names)

    def _recorded(self, names: tuple[str, ...]) -> list[str]:
        """Return the first name that the run has; for a pattern, all matches."""
        for name in names:
            if name in self._history.values:
                return [name]
            if is_pattern(name) and (matches := sorted(filter(pattern_of(name).fullmatch, self._history.values))):
                return matches
        return []

    def _finite_rows(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        """Return the rows at which all columns are finite, thinned to at most MAX_POINTS."""
        rows = np.flatnonzero(np.logical_and.reduce([np.isfinite(self._column(name)) for name in names]))
        if len(rows) <= MAX_POINTS:
            return rows
        middle = rows[NUM_FIRST:-NUM_NEWEST]
        stride = -(-len(middle) // (MAX_POINTS - NUM_FIRST - NUM_NEWEST))
        return np.concatenate([rows[:NUM_FIRST], middle[::stride], rows[-NUM_NEWEST:]])
