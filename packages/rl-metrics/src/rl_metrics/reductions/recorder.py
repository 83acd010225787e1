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
from typing import Any, SupportsFloat

import structlog
from numpy.typing import ArrayLike

from rl_core.errors import DataError
from rl_metrics.definitions.definition import Metric, MetricTable, Reduction
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.histogram import Histogram

log = structlog.get_logger(__name__)

_OTHER_STATE = "a state to merge must be an object of Recorder.to_json, with an object per metric; found {found}."


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

    def value(self) -> float | None:
        """Return the reduced value; NaN if all values are non-finite, None without a weighted value.

        An overflow results in infinity.
        """
        if self.reduction in ("mean", "sum"):
            if self.weight > 0:
                return _rounded(self.total / self.weight if self.reduction == "mean" else self.total)
        elif self.extreme is not None:
            return self.extreme
        return math.nan if self.num_nonfinite else None


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
            value, num_nonfinite = entry.value(), entry.num_nonfinite
            if value is not None and math.isinf(value):
                value, num_nonfinite = math.nan, num_nonfinite + 1
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

    def clear(self) -> None:
        """Discard all values, for the next step."""
        self._sums.clear()
        self._histograms.clear()

    def definition(self, name: str) -> Metric:
        """Return this recorder's definition of a metric."""
        return self._definitions.resolve(name, strict=self._strict)

    def to_json(self) -> dict[str, Any]:
        """Return the exact state as JSON values, to send to another rank."""
        sums: dict[str, Any] = {
            name: {
                "total": entry.total.as_integer_ratio(),
                "weight": entry.weight.as_integer_ratio(),
                "extreme": entry.extreme,
                "num_nonfinite": entry.num_nonfinite,
            }
            for name, entry in self._sums.items()
        }
        return sums | {name: {"histogram": one.to_json()} for name, one in self._histograms.items()}

    def merge_json(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the state from another rank's `to_json`.

        Raises:
            DataError: The value is not a recorder's JSON, or a name is undefined (strict).
        """
        if not isinstance(state, Mapping):
            raise DataError(_OTHER_STATE.format(found=type(state).__name__))
        for name, theirs in state.items():
            if not isinstance(theirs, Mapping):
                raise DataError(_OTHER_STATE.format(found=f"{type(theirs).__name__} as {name!r}"))
            if "histogram" in theirs:
                self._histogram(name).merge(Histogram.from_json(theirs["histogram"]))
                continue
            ours = self._entry(name)
            ours.merge(_read_sum(name, ours.reduction, theirs))

    def _entry(self, name: str) -> _Sum:
        entry = self._sums.get(name)
        if entry is None:
            reduction = self.definition(name).reduction
            if reduction == "histogram" or name in self._histograms:
                raise DataError(
                    f"{name} is a histogram, which does not accept single values. Use Recorder.record_values."
                )
            entry = self._sums[name] = _Sum(reduction=reduction)
        return entry

    def _histogram(self, name: str) -> Histogram:
        histogram = self._histograms.get(name)
        if histogram is None:
            reduction = self.definition(name).reduction
            is_defined = name in self._definitions or name in self._sums  # an undefined metric may be either
            if reduction != "histogram" and is_defined:
                raise DataError(
                    f"{name} is reduced by {reduction!r}, not as a histogram. Use Recorder.record, or define it with "
                    "reduction 'histogram'."
                )
            histogram = self._histograms[name] = Histogram()
        return histogram


def _rounded(value: Fraction) -> float:
    """Return the nearest float; infinite if it overflows."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


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


def _read_sum(name: str, reduction: Reduction, state: Mapping[str, Any]) -> _Sum:
    try:
        extreme, num_nonfinite = state["extreme"], state["num_nonfinite"]
        if type(num_nonfinite) is not int or num_nonfinite < 0:
            raise TypeError("num_nonfinite must be an integer >= 0")
        return _Sum(
            reduction=reduction,
            total=Fraction(*state["total"]),
            weight=Fraction(*state["weight"]),
            extreme=None if extreme is None else _number("extreme", extreme),
            num_nonfinite=num_nonfinite,
        )
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise DataError(_OTHER_STATE.format(found=f"another for {name!r}: {type(error).__name__} {error}")) from None
