"""The kinds of checks: pure functions that evaluate series of metrics at each step.

A check gets columns of finite numbers, each [n] float64 and of the same steps, and gives what it measured at each of
these, and where that is wrong. Windows end at the step that is judged.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rl_metrics.comparison.trends import mann_kendall_z, theil_sen

Floats = NDArray[np.float64]
Limits = Mapping[str, float]

SIGNIFICANT_Z = 2.576
"""Of a Mann-Kendall test at 1 %, both sides."""

MAX_TREND_POINTS = 200
"""Points that a trend is fitted to; more are thinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a check says.

    Attributes:
        values: [n] float64, what it measured up to each step.
        is_wrong: [n] bool, where that is beyond the limits.
        before: What the newest value is compared with; None where it is compared with limits alone.
    """

    values: Floats
    is_wrong: NDArray[np.bool_]
    before: float | None = None


CheckKind = Callable[[tuple[Floats, ...], Limits, int], Measured]
"""Columns, limits by name, window in steps; every column has at least one value."""


def level(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The running median is below `min` or above `max`; of two columns, that of the first over the second."""
    values = running_median(quotient(columns), window)
    return Measured(values=values, is_wrong=_outside(values, limits))


def part_level(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """As `level`, of the first column's share in the sum of both."""
    return level((columns[0], columns[0] + columns[1]), limits, window)


def mean_level(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The running mean is below `min` or above `max`: for shares of time, which may take turns from step to step."""
    values = _running(np.mean, quotient(columns), window)
    return Measured(values=values, is_wrong=_outside(values, limits))


def highest(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Any value of the window is above `max`: for proofs and counts that should never be so."""
    values = _running(np.max, columns[0], window)
    return Measured(values=values, is_wrong=_outside(values, limits))


def zero(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """All values of all columns are at most `max` away from 0 throughout the window."""
    largest = np.max([np.abs(column) for column in columns], axis=0)
    values = _running(np.max, largest, window)
    return Measured(values=values, is_wrong=values <= limits["max"])


def fall(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The running median has fallen from the best before it by more than the share `max`, and by more than `by`.

    The share is relative to the best value, or to the gain from the start if that is larger. With `errors`, both
    medians get a margin of that many standard errors, so that the maximum of noise does not count as a gain. A second
    column has the upper ends of the values' intervals; the medians must then differ by more than their intervals. With
    `held`, that many consecutive values must have fallen.
    """
    smooth = running_median(columns[0], window)
    best = np.maximum.accumulate(smooth)
    scale = np.maximum(np.abs(best), best - smooth[0])
    values = _ratio(best - smooth, scale)
    if len(columns) > 1:
        margin = running_median(columns[1] - columns[0], window) / math.sqrt(2)  # of two, independent ones
    else:
        margin = limits.get("errors", 0.0) * _median_errors(columns[0], window)
    is_beyond_noise = np.maximum.accumulate(smooth - margin) > smooth + margin
    is_wrong = (values > limits["max"]) & (best - smooth > limits.get("by", 0.0)) & is_beyond_noise
    return Measured(values=values, is_wrong=_held(is_wrong, limits), before=float(best[-1]))


def no_rise(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The best running median is above the start by less than the share `min`; of the start, or of the second column.

    The second column, where given, is the largest value of each step: what a perfect step would have.
    """
    smooth = running_median(columns[0], window)
    begun = min(window, len(smooth)) - 1
    start = float(smooth[begun])
    best = np.maximum.accumulate(np.concatenate([np.full(begun, start), smooth[begun:]]))
    top = np.maximum.accumulate(columns[1]) if len(columns) > 1 else np.zeros_like(smooth)
    values = _ratio(best - start, np.maximum(top - start, abs(start)))
    is_wrong = values < limits["min"]
    is_wrong[:window] = True
    return Measured(values=values, is_wrong=is_wrong, before=start)


def risen(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The running median is above the start by the share `min` or more; columns as in `no_rise`."""
    smooth = running_median(columns[0], window)
    start = float(smooth[min(window, len(smooth)) - 1])
    top = np.maximum.accumulate(columns[1]) if len(columns) > 1 else np.zeros_like(smooth)
    values = _ratio(smooth - start, np.maximum(top - start, abs(start)))
    return Measured(values=values, is_wrong=values >= limits["min"], before=start)


def near_top(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The running median has come to the share `min` of the top, and was not there all the time.

    The top is the highest value so far of the second column, where given: the largest of each step. Else it is the
    best running median, if that is at least twice the first. The share is of the top's size, or of the way there from
    the lowest value where that is longer, so that it also means something where values are negative.
    """
    smooth = running_median(columns[0], window)
    lowest = np.minimum.accumulate(columns[0])
    if len(columns) > 1:
        top = np.maximum.accumulate(columns[1])
        has_come = np.maximum.accumulate(columns[1] - columns[0]) > LEAST_GAIN * np.abs(top)
    else:
        top = np.maximum.accumulate(smooth)
        has_come = (top > smooth[0]) & (top - smooth[0] >= np.abs(top) / 2)
    values = 1.0 - _ratio(top - smooth, np.maximum(np.abs(top), top - lowest))
    return Measured(values=values, is_wrong=(values >= limits["min"]) & has_come)


LEAST_GAIN = 1e-6
"""Of a value: less is rounding."""


def rises(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The newest window has a rising trend that chance does not explain."""
    return _trend(columns[0], limits, window, is_steady=False)


def grows(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """A steady growth over the newest window, in both of its halves, by more than the share `max` of its start.

    The first `skip` values of all are left out.
    """
    return _trend(columns[0], limits, window, is_steady=True)


def jumps(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """More than `count` values of the window are above `least`, and more than `times` the median of the ten before."""
    column = columns[0]
    before = np.concatenate([column[:1], running_median(column, JUMP_BASE)[:-1]])
    is_jump = (column > limits["times"] * before) & (column > limits.get("least", 0.0))
    is_jump[:FIRST_JUMP] = False
    values = _running(np.sum, is_jump.astype(np.float64), window)
    return Measured(values=values, is_wrong=values > limits["count"], before=float(before[-1]))


def leap(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The median of the newest five values is more than `times` that of the first five, and above `min`."""
    smooth = running_median(columns[0], SHORT)
    start = float(smooth[min(SHORT, len(smooth)) - 1])
    values = running_median(smooth, window)
    is_wrong = (values > limits["times"] * max(start, 0.0)) & (values > limits.get("min", -math.inf))
    return Measured(values=values, is_wrong=is_wrong, before=start)


def shrunk(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The running median is below the share `min` of the first one, and below `below`."""
    smooth = running_median(columns[0], window)
    start = float(np.median(columns[0][: min(SHORT, len(smooth))]))
    values = _ratio(smooth, np.full_like(smooth, start))
    is_wrong = (values < limits["min"]) & (smooth < limits.get("below", math.inf)) & (start > 0)
    return Measured(values=values, is_wrong=is_wrong, before=start)


def sudden_fall(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Within the window, a median of three values is below the share `min` of that five steps before, if at `least`."""
    smooth = running_median(columns[0], 3)
    share = np.ones_like(smooth)
    if len(smooth) > SHORT + 2:  # full medians alone
        before = smooth[2:-SHORT]
        fallen = _ratio(smooth[SHORT + 2 :], before)
        share[SHORT + 2 :] = np.where(before >= limits.get("least", 0.0), fallen, 1.0)
    values = _running(np.min, share, window)
    return Measured(values=values, is_wrong=values < limits["min"])


def gap(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The second column has come to lie below the first by more than the share `max` of the first: running medians.

    As the two may be sampled in different ways, a gap that was there at first does not count: more than half of it
    must have come since. Nor does what `errors` standard errors explain. The third column, where given, is the upper
    end of the second one's interval, and has the errors of that. With `held`, so many values in a row have to be apart.
    """
    first, second = (running_median(column, window) for column in columns[:2])
    errors = limits.get("errors", 0.0)
    of_second = errors * _median_errors(columns[1], window)
    if len(columns) > 2:
        of_second = running_median(columns[2] - columns[1], window)
    apart = first - second
    grown = apart - apart[min(window, len(apart)) - 1]
    noise = np.hypot(errors * _median_errors(columns[0], window), of_second)
    is_wrong = (apart > limits["max"] * np.abs(first) + noise) & (grown > np.maximum(noise, apart / 2))
    return Measured(values=_ratio(apart, np.abs(first)), is_wrong=_held(is_wrong, limits), before=float(first[-1]))


def lost(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """The newest `max` values or more are not there, or not finite, though nearly all before them were.

    It gets its column with NaN where there is no finite value.
    """
    del window
    missing = num_lost(columns[0])
    values = np.zeros(len(columns[0]))
    values[len(values) - missing :] = missing
    return Measured(values=values, is_wrong=values >= max(limits["max"], 1))


KINDS: dict[str, CheckKind] = {
    kind.__name__: kind
    for kind in (
        *(level, part_level, mean_level, highest, zero, fall, no_rise, risen, near_top, rises, grows),
        *(jumps, leap, shrunk, sudden_fall, gap, lost),
    )
}
"""By the name that rules use."""

WITH_GAPS = frozenset({"lost"})
"""Kinds that get columns as they are: from their first finite value on, or whole where they have none."""

DENSE = 0.8
"""Share of the steps that have a metric which every step is meant to have; validations are rarer."""

SHORT = 5
JUMP_BASE = 10
FIRST_JUMP = 3
"""Values before the first that can be a jump: the first steps also start things."""


def num_lost(column: Floats) -> int:
    """How many of the newest values are not finite, where nearly all from the first finite one on were; else 0.

    All, where none ever was: what a run does not record has no column.
    """
    finite = np.flatnonzero(np.isfinite(column))
    if not len(finite):
        return len(column)
    if len(finite) < DENSE * (finite[-1] - finite[0] + 1):
        return 0
    return len(column) - 1 - int(finite[-1])


def running_median(column: Floats, window: int) -> Floats:
    """[n] median of the last `window` values up to each; of fewer at the start."""
    window = max(1, min(window, len(column)))
    ordered: list[float] = []
    start = []
    for value in column[: window - 1].tolist():
        insort(ordered, value)
        start.append((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
    return np.concatenate([start, np.median(sliding_window_view(column, window), axis=-1)])


def _median_errors(column: Floats, window: int) -> Floats:
    """[n] standard errors of the running median, from how much neighbours differ: a trend is no noise."""
    if len(column) < 3:
        return np.zeros(len(column))
    steps = np.diff(column)
    spread = MAD_OF_A_DIFFERENCE * float(np.median(np.abs(steps - np.median(steps))))
    errors: Floats = MEDIAN_ERROR * spread / np.sqrt(np.minimum(np.arange(1, len(column) + 1), window))
    return errors


MAD_OF_A_DIFFERENCE = 1.4826 / math.sqrt(2)
"""Times the median absolute deviation of differences: the standard deviation of what is normally distributed."""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean."""


def quotient(columns: tuple[Floats, ...]) -> Floats:
    """[n] the first column over the second; the first alone where there is no other."""
    return _ratio(columns[0], columns[1]) if len(columns) > 1 else columns[0]


def _trend(column: Floats, limits: Limits, window: int, *, is_steady: bool) -> Measured:
    newest = column[min(int(limits.get("skip", 0)), len(column) - 1) :][-window:]
    thinned = newest[:: max(1, math.ceil(len(newest) / MAX_TREND_POINTS))]
    growth = _slope(thinned) * (len(thinned) - 1)
    start = float(np.median(newest[: max(1, len(newest) // 5)]))
    share = float(_ratio(np.array([growth]), np.array([abs(start)]))[0])
    is_wrong = mann_kendall_z(thinned) > SIGNIFICANT_Z and share > limits["max"] and growth > limits.get("by", 0)
    if is_wrong and is_steady:
        half = len(thinned) // 2
        slopes = sorted(_slope(part) for part in (thinned[:half], thinned[half:]))
        is_wrong = slopes[0] > STEADY_SHARE * slopes[1]
    since = np.zeros(len(column), dtype=np.bool_)
    since[len(column) - len(newest) :] = is_wrong
    return Measured(values=np.full(len(column), share), is_wrong=since, before=start)


STEADY_SHARE = 0.4
"""The slower half of a steady growth has at least this share of the faster one's slope."""


def _slope(column: Floats) -> float:
    """Per value."""
    return theil_sen(np.arange(len(column), dtype=np.float64), column)


def _running(reduce: Callable[..., Floats], column: Floats, window: int) -> Floats:
    window = max(1, min(window, len(column)))
    start = np.array([reduce(column[: n + 1]) for n in range(window - 1)], dtype=np.float64)
    return np.concatenate([start, np.asarray(reduce(sliding_window_view(column, window), axis=-1), dtype=np.float64)])


def _held(is_wrong: NDArray[np.bool_], limits: Limits) -> NDArray[np.bool_]:
    return _running(np.min, is_wrong.astype(np.float64), int(limits.get("held", 1))) > 0


def _outside(values: Floats, limits: Limits) -> NDArray[np.bool_]:
    return (values < limits.get("min", -math.inf)) | (values > limits.get("max", math.inf))


def _ratio(over: Floats, under: Floats) -> Floats:
    """[n] quotients; 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.nan_to_num(over / under, nan=0.0, posinf=FAR, neginf=-FAR)


FAR = 1e300
"""Stands for a quotient that is not finite."""
