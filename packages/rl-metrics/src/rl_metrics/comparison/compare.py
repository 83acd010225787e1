"""Comparison of two runs, or two sets of seeds, by metric, with confidence intervals."""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rl_core.errors import DataError
from rl_metrics.comparison.intervals import (
    MIN_STEPS,
    Interval,
    difference_of_estimates,
    difference_over_runs,
    difference_over_steps,
    mean_over_steps,
)
from rl_metrics.definitions.table import CHAPTERS, DEFINITIONS, chapter_of
from rl_metrics.run_files.history import FloatColumn, History, IntColumn
from rl_metrics.run_files.json_lines import number_or_none

Method = Literal["same steps", "own steps", "validation", "runs", "none"]
"""Basis of an interval.

In order: differences at the same steps; each run's own steps, if few are shared; the validations' own intervals; the
means of several runs; no interval.
"""

ENDS = ("/ci_low", "/ci_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of one metric between two sides.

    Attributes:
        metric: Name of the metric.
        a: Mean of the first side.
        b: Mean of the second side.
        interval: 95 % confidence interval of b minus a.
        method: Basis of the interval.
        num_steps: Number of steps used; for several runs, the smallest.
        num_runs: Number of runs per side that have the metric.
    """

    metric: str
    a: float
    b: float
    interval: Interval
    method: Method
    num_steps: int
    num_runs: tuple[int, int] = (1, 1)

    @property
    def difference(self) -> float:
        """b minus a."""
        return self.b - self.a

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval.is_known and not self.interval.contains(0.0)

    @property
    def sureness(self) -> float:
        """Distance of the difference from 0 in half widths of its interval; -1 if unknown."""
        half = (self.interval.high - self.interval.low) / 2
        if not self.interval.is_known:
            return -1.0
        return abs(self.difference) / half if half > 0 else math.inf if self.difference else 0.0

    @property
    def chapter(self) -> str:
        """Chapter of the metric."""
        return chapter_of(self.metric)

    @property
    def unit(self) -> str:
        """Unit of its values; "?" for an undefined metric."""
        metric = DEFINITIONS.find(self.metric)
        return "?" if metric is None else metric.unit

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values; unknown values are null."""
        return {
            "metric": self.metric,
            "chapter": self.chapter,
            "unit": self.unit,
            "a": number_or_none(self.a),
            "b": number_or_none(self.b),
            "difference": number_or_none(self.difference),
            "low": number_or_none(self.interval.low),
            "high": number_or_none(self.interval.high),
            "is_clear": self.is_clear,
            "method": self.method,
            "num_steps": self.num_steps,
            "num_runs": list(self.num_runs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All metrics of two sides.

    Attributes:
        differences: Differences by chapter; within each, clear ones first, ordered by certainty.
        only_a: Metrics that the second side lacks.
        only_b: Metrics that the first side lacks.
    """

    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare(
    a: Sequence[History], b: Sequence[History], *, patterns: Sequence[str] = (), last: int | None = None
) -> Comparison:
    """Compare two sides of one run or several seeds each.

    Args:
        a: Runs of the first side.
        b: Runs of the second side.
        patterns: Metrics to compare, such as "actor/*"; none compares all.
        last: Number of last steps of each run to use; None uses all.

    Raises:
        DataError: A side is empty, or `last` is below 1.
    """
    if not a or not b:
        raise DataError("a comparison needs at least one run on each side.")
    if last is not None and last < 1:
        raise DataError(f"`last` must be at least 1; found {last}.")
    windows = [[_window(history, last) for history in side] for side in (a, b)]
    names_a, names_b = (_names(side, patterns) for side in windows)
    with np.errstate(over="ignore", invalid="ignore"):  # values near the largest float have no interval
        differences = [_difference(name, windows[0], windows[1]) for name in names_a if name in names_b]
    order = {chapter: number for number, chapter in enumerate(CHAPTERS)}
    differences.sort(key=lambda one: (order[one.chapter], not one.is_clear, -one.sureness, one.metric))
    return Comparison(
        differences=tuple(differences),
        only_a=tuple(sorted(names_a.keys() - names_b.keys())),
        only_b=tuple(sorted(names_b.keys() - names_a.keys())),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """The compared steps of a run."""

    steps: IntColumn
    column: Callable[[str], FloatColumn]
    names: Mapping[str, FloatColumn]

    def series(self, name: str) -> tuple[IntColumn, FloatColumn]:
        """Return the steps that have the metric, and its values there."""
        values = self.column(name)
        has = np.isfinite(values)
        return self.steps[has], values[has]


def _window(history: History, last: int | None) -> _Window:
    start = 0 if last is None else max(len(history.steps) - last, 0)
    return _Window(history.steps[start:], lambda name: history.values[name][start:], history.values)


def _names(windows: Sequence[_Window], patterns: Sequence[str]) -> dict[str, None]:
    """Return the metrics with a value in the window of at least one run of the side."""
    names = dict.fromkeys(name for window in windows for name in window.names)
    matching = {name for pattern in patterns or ("*",) for name in names if fnmatch.fnmatchcase(name, pattern)}
    return dict.fromkeys(
        name for name in names if name in matching and not name.endswith(ENDS) and _having(windows, name)
    )


def _having(windows: Sequence[_Window], name: str) -> list[_Window]:
    """Return the windows with a value of the metric."""
    return [window for window in windows if name in window.names and len(window.series(name)[0])]


def _difference(name: str, a: Sequence[_Window], b: Sequence[_Window]) -> Difference:
    runs_a, runs_b = _having(a, name), _having(b, name)
    if len(a) > 1 or len(b) > 1:
        return _over_runs(name, runs_a, runs_b)
    return _of_two(name, runs_a[0], runs_b[0])


def _over_runs(name: str, a: Sequence[_Window], b: Sequence[_Window]) -> Difference:
    means_a, means_b = (np.array([_mean(name, one) for one in side]) for side in (a, b))
    interval = difference_over_runs(means_a, means_b)
    return Difference(
        metric=name,
        a=float(means_a.mean()),
        b=float(means_b.mean()),
        interval=interval,
        method="runs" if interval.is_known else "none",
        num_steps=min(len(one.series(name)[0]) for one in (*a, *b)),
        num_runs=(len(a), len(b)),
    )


def _mean(name: str, window: _Window) -> float:
    """Return a run's value: the newest for a validation with its own interval, else the window's mean."""
    _, values = window.series(name)
    return float(values[-1]) if name + ENDS[0] in window.names else float(values.mean())


def _of_two(name: str, a: _Window, b: _Window) -> Difference:
    validated = _of_validations(name, a, b)
    if validated is not None:
        return validated
    (steps_a, values_a), (steps_b, values_b) = a.series(name), b.series(name)
    is_common_a = np.isin(steps_a, steps_b, assume_unique=True)
    num_common = int(is_common_a.sum())
    method: Method
    if num_common >= MIN_STEPS or 2 * num_common >= min(len(steps_a), len(steps_b)):
        values_a, values_b = values_a[is_common_a], values_b[np.isin(steps_b, steps_a, assume_unique=True)]
        method, interval, num_steps = "same steps", mean_over_steps(values_b - values_a), num_common
    else:
        method, interval = "own steps", difference_over_steps(values_a, values_b)
        num_steps = min(len(values_a), len(values_b))
    return Difference(
        metric=name,
        a=float(values_a.mean()),
        b=float(values_b.mean()),
        interval=interval,
        method=method if interval.is_known else "none",
        num_steps=num_steps,
    )


def _of_validations(name: str, a: _Window, b: _Window) -> Difference | None:
    """Return the difference of the newest validations at a common step that have intervals, or None."""
    if not all(name + end in one.names for one in (a, b) for end in ENDS):
        return None
    estimates_a, estimates_b = _estimates(name, a), _estimates(name, b)
    common = estimates_a.keys() & estimates_b.keys()
    if not common:
        return None
    (mean_a, of_a), (mean_b, of_b) = estimates_a[max(common)], estimates_b[max(common)]
    interval = difference_of_estimates(mean_a, of_a, mean_b, of_b)
    return Difference(metric=name, a=mean_a, b=mean_b, interval=interval, method="validation", num_steps=1)


def _estimates(name: str, window: _Window) -> dict[int, tuple[float, Interval]]:
    """Return the mean and its interval by step."""
    values, lows, highs = (window.column(name + end) for end in ("", *ENDS))
    known = np.flatnonzero(np.isfinite(values) & np.isfinite(lows) & np.isfinite(highs))
    return {
        int(window.steps[row]): (float(values[row]), Interval(float(lows[row]), float(highs[row]))) for row in known
    }
