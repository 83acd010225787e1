"""Exact reduction of one step's values over micro-batches and ranks.

Sums are fractions, so reduced values are correctly rounded and bitwise independent of the order of values and their
split over micro-batches and ranks. The same holds for histograms.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import SupportsFloat

import structlog
from numpy.typing import ArrayLike

from rl_core.errors import DataError
from rl_metrics.definitions.definition import MetricTable, Reduction
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.histogram import Histogram

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Sum:
    """Recorded values of one metric.

    Attributes:
        reduction: Reduction of the metric.
        total: Weighted sum of the finite values; for "sum", their sum.
        weight: Sum of the weights of the finite values.
        extreme: Smallest, largest or newest finite value, by reduction.
        num_nonfinite: Number of NaN and infinite values, which the others exclude.
    """

    reduction: Reduction
    total: Fraction = field(default_factory=Fraction)
    weight: Fraction = field(default_factory=Fraction)
    extreme: float | None = None
    num_nonfinite: int = 0

    def add(self, value: float, weight: float) -> None:
        if not math.isfinite(value):
            self.num_nonfinite += 1
        elif self.reduction in ("mean", "sum"):
            exact_weight = Fraction(weight)
            self.total += Fraction(value) * exact_weight if self.reduction == "mean" else Fraction(value)
            self.weight += exact_weight
        else:
            self.add_extreme(value)

    def add_extreme(self, value: float) -> None:
        if self.extreme is None or self.reduction == "last":
            self.extreme = value
        else:
            self.extreme = min(self.extreme, value) if self.reduction == "min" else max(self.extreme, value)

    def merge(self, other: "_Sum") -> None:
        self.total += other.total
        self.weight += other.weight
        self.num_nonfinite += other.num_nonfinite
        if other.extreme is not None:
            self.add_extreme(other.extreme)

    def reduced(self) -> tuple[float | None, int]:
        """Return the value, and the number of NaN and infinite ones, including a result that overflows.

        The value is NaN if all were, and None without a weighted one.
        """
        if self.weight > 0:
            try:
                value = float(self.total / self.weight if self.reduction == "mean" else self.total)
            except OverflowError:
                return math.nan, self.num_nonfinite + 1
            return value, self.num_nonfinite
        return math.nan if self.extreme is None and self.num_nonfinite else self.extreme, self.num_nonfinite


class Recorder:
    """Collects the metrics of one step; `reduce` returns one value per metric, `histograms` the distributions.

    A NaN or infinite value is excluded from its metric and counted in `nonfinite/{metric}`, which is reported only if
    it is above 0. The same holds for a reduced value that overflows. A value with weight 0 (the mean of nothing) is
    ignored.
    """

    def __init__(
        self,
        *,
        definitions: MetricTable = DEFINITIONS,
        strict: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create an empty recorder.

        Args:
            definitions: The metrics that may be recorded.
            strict: True raises for an undefined metric (for tests); False warns once and uses the mean.
            clock: Returns seconds, for `timer`.
        """
        self._definitions = definitions
        self._strict = strict
        self._clock = clock
        self._sums: dict[str, _Sum] = {}
        self._histograms: dict[str, Histogram] = {}

    def record(self, name: str, value: SupportsFloat, *, weight: SupportsFloat = 1.0) -> None:
        """Add one value.

        Args:
            name: A defined metric.
            value: A number, or a scalar array or tensor.
            weight: Number of tokens, trajectories, ... (the definition's `weighted_by`) that the value is the mean of;
                used only in means.

        Raises:
            DataError: The name is undefined (strict) or a histogram's, the value is not a single number, or the weight
                is negative or not finite.
        """
        weight = _number(f"weight of {name}", weight)
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(
                f"weight of {name} must be finite and at least 0; found {weight}. Pass how many it stands for."
            )
        entry = self._entry(name)
        if weight > 0:
            entry.add(_number(name, value), weight)

    def record_all(self, values: Mapping[str, SupportsFloat], *, weight: SupportsFloat = 1.0) -> None:
        """Add one value to each of several metrics, with one weight."""
        for name, value in values.items():
            self.record(name, value, weight=weight)

    def record_values(self, name: str, values: ArrayLike) -> None:
        """Add the values of an array of any shape to a histogram.

        Args:
            name: A defined metric whose reduction is "histogram".
            values: One value per token, trajectory, ... (the definition's `weighted_by`).

        Raises:
            DataError: The name is undefined (strict) or not a histogram's, or a value is not a number.
        """
        self._histogram(name).add(values)

    def record_distributions(self, distributions: Mapping[str, ArrayLike]) -> None:
        """Add values to several histograms, by name."""
        for name, values in distributions.items():
            self.record_values(name, values)

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Record the duration of a block as `timing_s/{phase}`, even if it raises."""
        started = self._clock()
        try:
            yield
        finally:
            self.record(f"timing_s/{phase}", self._clock() - started)

    def merge(self, other: "Recorder") -> None:
        """Add another recorder's values; for a "last" metric, its value becomes the newest.

        Raises:
            DataError: The two define a metric differently.
        """
        for name, theirs in other._sums.items():
            ours = self._entry(name)
            if ours.reduction != theirs.reduction:
                raise DataError(
                    f"{name} is reduced by {ours.reduction!r} here and by {theirs.reduction!r} in the recorder to "
                    "merge; use the same MetricTable for both."
                )
            ours.merge(theirs)
        for name, histogram in other._histograms.items():
            self._histogram(name).merge(histogram)

    def reduce(self) -> dict[str, float]:
        """Return one value per metric, in the order of first recording.

        A metric without a weighted value is left out; one with only non-finite values is NaN.
        """
        values: dict[str, float] = {}
        nonfinite: dict[str, float] = {}
        for name, entry in self._sums.items():
            value, num_nonfinite = entry.reduced()
            if value is not None:
                values[name] = value
            if num_nonfinite:
                nonfinite[f"nonfinite/{name}"] = float(num_nonfinite)
        for name, histogram in self._histograms.items():
            if histogram.num_nonfinite:
                nonfinite[f"nonfinite/{name}"] = float(histogram.num_nonfinite)
        if nonfinite:
            log.warning(
                "nonfinite_metrics", counts={name.removeprefix("nonfinite/"): n for name, n in nonfinite.items()}
            )
        return values | nonfinite

    def histograms(self) -> dict[str, Histogram]:
        """Return the distributions that have a finite value, in the order of first recording."""
        return {name: histogram for name, histogram in self._histograms.items() if histogram.count}

    def _entry(self, name: str) -> _Sum:
        entry = self._sums.get(name)
        if entry is None:
            reduction = self._definitions.resolve(name, strict=self._strict).reduction
            if reduction == "histogram" or name in self._histograms:
                raise DataError(
                    f"{name} is a histogram, which does not accept single values. Use Recorder.record_values."
                )
            entry = self._sums[name] = _Sum(reduction=reduction)
        return entry

    def _histogram(self, name: str) -> Histogram:
        histogram = self._histograms.get(name)
        if histogram is None:
            reduction = self._definitions.resolve(name, strict=self._strict).reduction
            is_defined = name in self._definitions or name in self._sums  # an undefined metric may be either
            if reduction != "histogram" and is_defined:
                raise DataError(
                    f"{name} is reduced by {reduction!r}, not as a histogram. Use Recorder.record, or define it with "
                    "reduction 'histogram'."
                )
            histogram = self._histograms[name] = Histogram()
        return histogram


def _number(what: str, value: SupportsFloat) -> float:
    """Convert a value to a single number.

    Raises:
        DataError: The value is text, None, an array of several numbers, or another object.
    """
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
        reason = repr(value[:40])
    except (TypeError, ValueError, OverflowError) as error:
        reason = f"{type(value).__name__} ({error})"
    except RuntimeError as error:  # torch's error for a tensor of several numbers
        if not getattr(value, "ndim", 0):
            raise
        reason = f"{type(value).__name__} ({error})"
    raise DataError(
        f"{what} must be a number, or a scalar array or tensor; found {reason}. Skip a missing value, and record "
        "the mean of several numbers with Recorder.record(..., weight=count)."
    )
