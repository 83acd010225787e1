"""Kinds of checks: pure functions that evaluate series of metrics at each step.

A check receives columns of finite numbers, each [n] float64 at the same steps. It returns its measured value at each
step, and whether the value is wrong. Windows end at the judged step.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rl_metrics.comparison.intervals import mann_kendall_z, theil_sen

Floats = NDArray[np.float64]
Limits = Mapping[str, float]

SIGNIFICANT_Z = 2.576
"""Critical value of a two-sided Mann-Kendall test at 1 %."""

MAX_TREND_POINTS = 200
"""Maximum number of points for a trend; longer series are thinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of a check.

    Attributes:
        values: [n] float64, value measured at each step.
        is_wrong: [n] bool, whether the value is beyond the limits.
        before: Earlier value that the newest is compared with; None if only limits are compared.
    """

    values: Floats
    is_wrong: NDArray[np.bool_]
    before: float | None = None


CheckKind = Callable[[tuple[Floats, ...], Limits, int], Measured]
"""Function of columns, limits by name, and window in steps; every column has at least one value."""


def level(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median below `min` or above `max`; with two columns, of their quotient."""
    values = running_median(quotient(columns), window)
    return Measured(values=values, is_wrong=_outside(values, limits))


def part_level(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Apply `level` to the first column's share of the sum of both."""
    return level((columns[0], columns[0] + columns[1]), limits, window)


def mean_level(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running mean below `min` or above `max`; for shares of time, which may alternate between steps."""
    values = running(np.mean, quotient(columns), window)
    return Measured(values=values, is_wrong=_outside(values, limits))


def highest(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find any value of the window above `max`; for proofs and counts that must not exceed it."""
    values = running(np.max, columns[0], window)
    return Measured(values=values, is_wrong=_outside(values, limits))


def zero(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a window in which all values of all columns are within `max` of 0."""
    largest = np.max([np.abs(column) for column in columns], axis=0)
    values = running(np.max, largest, window)
    return Measured(values=values, is_wrong=values <= limits["max"])


def cancels(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find running medians of two columns whose sum is within `max` of 0, the second within `each` of 0."""
    first, second = (running_median(column, window) for column in columns)
    is_true = (np.abs(first + second) <= limits["max"]) & (np.abs(second) <= limits["each"])
    return Measured(values=second, is_wrong=is_true)


def means_cancel(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find means over all steps so far that cancel as in `cancels`, the second with at least half of the first."""
    first, second = (np.cumsum(column) / np.arange(1, len(column) + 1) for column in columns)
    is_true = cancels((first, second), limits, 1).is_wrong & (np.abs(second) >= np.abs(first) / 2)
    del window
    return Measured(values=second, is_wrong=is_true)


def grown(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median above `times` its start, which is the median of the first five values above 0."""
    values = running_median(columns[0], window)
    start = _start_above_0(columns[0])
    is_wrong = values > (limits["times"] * start if start else math.inf)
    return Measured(values=values, is_wrong=is_wrong, before=start)


def within_bounds(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a spread that has grown by at most `times` the growth that the mean explains, between the same bounds.

    Columns are the spread, and the mean, minimum and maximum of the values. Values of 0 and 1 with the mean p, in few
    draws, have a spread of about p * (1 - p). It grows while rare successes become usual, and that is no instability.
    """
    spread, mean, low, high = columns
    lowest, highest = np.minimum.accumulate(low), np.maximum.accumulate(high)
    explained = running_median((mean - lowest) * (highest - mean), window)
    start, explained_start = _start_above_0(spread), _start_above_0(explained)
    is_wider = highest - lowest > WIDER * _start_above_0(highest - lowest)
    largest = limits["times"] * start * np.maximum(ratio(explained, np.full_like(explained, explained_start)), 1.0)
    return Measured(values=spread, is_wrong=(running_median(spread, window) <= largest) & ~is_wider, before=start)


WIDER = 1.5
"""Growth of the range of values that counts as new bounds."""


def _start_above_0(column: Floats) -> float:
    """Return the median of the first five values above 0; 0 without one."""
    above = column[column > 0][:SHORT]
    return float(np.median(above)) if len(above) else 0.0


def run_mean(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a mean over all steps so far below `min` or above `max`."""
    del window
    values = np.cumsum(columns[0]) / np.arange(1, len(columns[0]) + 1)
    return Measured(values=values, is_wrong=_outside(values, limits))


def rise_within(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a value of the window that is more than `by` above the median of the ten before, the first three aside."""
    rise = columns[0] - np.concatenate([columns[0][:1], running_median(columns[0], JUMP_BASE)[:-1]])
    rise[:FIRST_JUMP] = 0.0
    values = running(np.max, rise, window)
    return Measured(values=values, is_wrong=values > limits["by"])


def fall(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median below its earlier best by more than the share `max`, and by more than `by`.

    The share is relative to the best value, or to the gain from the start if that is larger. With `errors`, both
    medians get a margin of that many standard errors, so that the maximum of noise does not count as a gain. A second
    column holds the upper ends of the values' intervals; the medians must then differ by more than their intervals.
    With `held`, that many consecutive values must have fallen, as `_held` describes.
    """
    smooth = running_median(columns[0], window)
    best = np.maximum.accumulate(smooth)
    scale = np.maximum(np.abs(best), best - smooth[0])
    values = ratio(best - smooth, scale)
    if len(columns) > 1:
        margin = running_median(columns[1] - columns[0], window) / math.sqrt(2)  # the margin of two independent values
    else:
        margin = limits.get("errors", 0.0) * median_errors(columns[0], window)
    is_beyond_noise = np.maximum.accumulate(smooth - margin) > smooth + margin
    is_wrong = (values > limits["max"]) & (best - smooth > limits.get("by", 0.0)) & is_beyond_noise
    return Measured(values=values, is_wrong=_held(is_wrong, values, limits), before=float(best[-1]))


def no_rise(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a best running median that gained less than the share `min` over the start.

    The share is of the start, or of the distance from the start to the highest value of the optional second column, if
    larger. That column holds the maximum of each step.
    """
    smooth = running_median(columns[0], window)
    begun = min(window, len(smooth)) - 1
    start = float(smooth[begun])
    best = np.maximum.accumulate(np.concatenate([np.full(begun, start), smooth[begun:]]))
    top = np.maximum.accumulate(columns[1]) if len(columns) > 1 else np.zeros_like(smooth)
    values = ratio(best - start, np.maximum(top - start, abs(start)))
    is_wrong = values < limits["min"]
    is_wrong[:window] = True
    return Measured(values=values, is_wrong=is_wrong, before=start)


def stuck(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a best running median that gained at most the share `gain` in the window, and is below `below`.

    With a second column, the maximum of each step, it must instead have gone less than `share` of the way from the
    lowest value to the highest maximum. `sign` = -1 looks for values that should fall.
    """
    sign = limits.get("sign", 1.0)
    smooth = sign * running_median(columns[0], SHORT if len(columns) > 1 else 1)
    best = np.maximum.accumulate(smooth)
    before = np.concatenate([np.full(min(window, len(best)), np.nan), best[:-window]])
    if len(columns) > 1 and "share" in limits:
        lowest, top = np.minimum.accumulate(smooth), np.maximum.accumulate(columns[1])
        is_low = best - lowest < limits["share"] * (top - lowest)
    else:
        is_low = best < sign * limits.get("below", math.inf)
    is_wrong = (best - before <= limits["gain"] * np.abs(before)) & is_low
    return Measured(values=sign * best, is_wrong=is_wrong, before=float(sign * before[-1]))


def risen(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median above the start by at least the share `min`; columns as in `no_rise`."""
    smooth = running_median(columns[0], window)
    start = float(smooth[min(window, len(smooth)) - 1])
    top = np.maximum.accumulate(columns[1]) if len(columns) > 1 else np.zeros_like(smooth)
    values = ratio(smooth - start, np.maximum(top - start, abs(start)))
    return Measured(values=values, is_wrong=values >= limits["min"], before=start)


def near_top(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median that has reached the share `min` of the top, and was below it before.

    The top is the highest value so far of the optional second column, which holds the maximum of each step. Without it,
    the top is the best running median, if that is at least twice the first. The share is of the top's absolute value,
    or of its distance from the lowest value if that is larger, so that it also works for negative values.
    """
    smooth = running_median(columns[0], window)
    lowest = np.minimum.accumulate(columns[0])
    if len(columns) > 1:
        top = np.maximum.accumulate(columns[1])
        has_come = np.maximum.accumulate(columns[1] - columns[0]) > LEAST_GAIN * np.abs(top)
    else:
        top = np.maximum.accumulate(smooth)
        has_come = (top > smooth[0]) & (top - smooth[0] >= np.abs(top) / 2)
    values = 1.0 - ratio(top - smooth, np.maximum(np.abs(top), top - lowest))
    return Measured(values=values, is_wrong=(values >= limits["min"]) & has_come)


LEAST_GAIN = 1e-6
"""Minimum relative gain; less is rounding."""


def rises(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a significant rising trend in the newest window."""
    return _trend(columns[0], limits, window, is_steady=False)


def grows(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find steady growth in both halves of the newest window, by more than the share `max` of its start.

    The first `skip` values of the series are ignored.
    """
    return _trend(columns[0], limits, window, is_steady=True)


def jumps(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find more than `count` values of the window above `least` and above `times` the median of the ten before."""
    column = columns[0]
    before = np.concatenate([column[:1], running_median(column, JUMP_BASE)[:-1]])
    is_jump = (column > limits["times"] * before) & (column > limits.get("least", 0.0))
    is_jump[:FIRST_JUMP] = False
    values = running(np.sum, is_jump.astype(np.float64), window)
    return Measured(values=values, is_wrong=values > limits["count"], before=float(before[-1]))


def leap(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a median of the newest values above `times` that of the first five, and above `min`."""
    smooth = running_median(columns[0], SHORT)
    start = float(smooth[min(SHORT, len(smooth)) - 1])
    values = running_median(smooth, window)
    is_wrong = (values > limits["times"] * max(start, 0.0)) & (values > limits.get("min", -math.inf))
    return Measured(values=values, is_wrong=is_wrong, before=start)


def shrunk(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median below the share `min` of the start, and below `below`."""
    smooth = running_median(columns[0], window)
    start = float(np.median(columns[0][: min(SHORT, len(smooth))]))
    values = ratio(smooth, np.full_like(smooth, start))
    is_wrong = (values < limits["min"]) & (smooth < limits.get("below", math.inf)) & (start > 0)
    return Measured(values=values, is_wrong=is_wrong, before=start)


def sudden_fall(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a median of three values in the window below the share `min` of that five steps earlier."""
    smooth = running_median(columns[0], 3)
    share = np.ones_like(smooth)
    if len(smooth) > SHORT + 2:  # only medians of three values
        before = smooth[2:-SHORT]
        fallen = ratio(smooth[SHORT + 2 :], before)
        share[SHORT + 2 :] = np.where(before >= limits.get("least", 0.0), fallen, 1.0)
    values = running(np.min, share, window)
    return Measured(values=values, is_wrong=values < limits["min"])


def gap(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find a running median of the second column below that of the first by more than the share `max` of the first.

    The columns may be sampled differently, so more than half of the gap must have arisen since the start. The gap must
    also exceed `errors` standard errors. An optional third column holds the upper ends of the second one's intervals,
    which replace its standard errors. With `held`, that many consecutive values must be apart, as `_held` describes.
    """
    first, second = (running_median(column, window) for column in columns[:2])
    errors = limits.get("errors", 0.0)
    of_second = errors * median_errors(columns[1], window)
    if len(columns) > 2:
        of_second = running_median(columns[2] - columns[1], window)
    apart = first - second
    grown = apart - apart[min(window, len(apart)) - 1]
    noise = np.hypot(errors * median_errors(columns[0], window), of_second)
    is_wrong = (apart > limits["max"] * np.abs(first) + noise) & (grown > np.maximum(noise, apart / 2))
    values = ratio(apart, np.abs(first))
    return Measured(values=values, is_wrong=_held(is_wrong, values, limits), before=float(first[-1]))


def lost(columns: tuple[Floats, ...], limits: Limits, window: int) -> Measured:
    """Find at least `max` newest values that are missing or not finite, although nearly all before were finite.

    The column has NaN for such values.
    """
    del window
    missing = num_lost(columns[0])
    values = np.zeros(len(columns[0]))
    values[len(values) - missing :] = missing
    return Measured(values=values, is_wrong=values >= max(limits["max"], 1))


KINDS: dict[str, CheckKind] = {
    kind.__name__: kind
    for kind in (
        *(level, part_level, mean_level, run_mean, highest, zero, cancels, means_cancel, fall, no_rise, stuck, risen),
        *(near_top, rises, grows, jumps, leap, grown, within_bounds, rise_within, shrunk, sudden_fall, gap, lost),
    )
}
"""Kinds by the name that rules use."""

WITH_GAPS = frozenset({"lost"})
"""Kinds that receive columns with gaps: from the first finite value on, or complete if there is none."""

DENSE = 0.8
"""Minimum share of steps with a metric that counts as recorded at every step; validations are rarer."""

SHORT = 5
JUMP_BASE = 10
FIRST_JUMP = 3
"""Number of initial values that cannot be jumps, because first steps include start-up."""


def num_lost(column: Floats) -> int:
    """Return how many newest values are not finite if nearly all from the first finite one on were, else 0.

    If none is finite, all count; a metric that the run does not record has no column.
    """
    finite = np.flatnonzero(np.isfinite(column))
    if not len(finite):
        return len(column)
    if len(finite) < DENSE * (finite[-1] - finite[0] + 1):
        return 0
    return len(column) - 1 - int(finite[-1])


def quotient(columns: tuple[Floats, ...]) -> Floats:
    """Return the [n] first column over the second; the first alone without a second."""
    return ratio(columns[0], columns[1]) if len(columns) > 1 else columns[0]


def _trend(column: Floats, limits: Limits, window: int, *, is_steady: bool) -> Measured:
    newest = column[min(int(limits.get("skip", 0)), len(column) - 1) :][-window:]
    thinned = newest[:: max(1, math.ceil(len(newest) / MAX_TREND_POINTS))]
    growth = _slope(thinned) * (len(thinned) - 1)
    start = float(np.median(newest[: max(1, len(newest) // 5)]))
    share = float(ratio(np.array([growth]), np.array([abs(start)]))[0])
    is_wrong = mann_kendall_z(thinned) > SIGNIFICANT_Z and share > limits["max"] and growth > limits.get("by", 0)
    if is_wrong and is_steady:
        half = len(thinned) // 2
        slopes = sorted(_slope(part) for part in (thinned[:half], thinned[half:]))
        is_wrong = slopes[0] > STEADY_SHARE * slopes[1]
    since = np.zeros(len(column), dtype=np.bool_)
    since[len(column) - len(newest) :] = is_wrong
    return Measured(values=np.full(len(column), share), is_wrong=since, before=start)


STEADY_SHARE = 0.4
"""Minimum ratio of the slower half's slope to the faster half's in steady growth."""


def _slope(column: Floats) -> float:
    """Return the Theil-Sen slope per value."""
    return theil_sen(np.arange(len(column), dtype=np.float64), column)


def _held(is_wrong: NDArray[np.bool_], values: Floats, limits: Limits) -> NDArray[np.bool_]:
    """Return where `held` values in a row are wrong.

    Below `sure` values, all but the first are enough, but at least two, and the newest must not be on its way back: it
    has most of the worst one's value.
    """
    held = int(limits.get("held", 1))
    has_held = running(np.min, is_wrong.astype(np.float64), held) > 0
    for n in range(1, min(int(limits.get("sure", 0)), len(values) + 1)):
        row = slice(max(n - held, 1), n)
        has_held[n - 1] = n > 2 and bool(is_wrong[row].all()) and values[n - 1] >= STILL * values[row].max()
    return has_held


STILL = 0.9
"""Minimum share of the worst value at which the newest of a few counts as no recovery."""


def _outside(values: Floats, limits: Limits) -> NDArray[np.bool_]:
    return (values < limits.get("min", -math.inf)) | (values > limits.get("max", math.inf))


def running_median(column: Floats, window: int) -> Floats:
    """Return the [n] median of the last `window` values at each step; of fewer at the start."""
    window = max(1, min(window, len(column)))
    ordered: list[float] = []
    start = []
    for value in column[: window - 1].tolist():
        insort(ordered, value)
        start.append((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
    return np.concatenate([start, np.median(sliding_window_view(column, window), axis=-1)])


def median_errors(column: Floats, window: int) -> Floats:
    """Return [n] standard errors of the running median, from differences of adjacent values, which ignore trends."""
    if len(column) < 3:
        return np.zeros(len(column))
    steps = np.diff(column)
    spread = MAD_OF_A_DIFFERENCE * float(np.median(np.abs(steps - np.median(steps))))
    errors: Floats = MEDIAN_ERROR * spread / np.sqrt(np.minimum(np.arange(1, len(column) + 1), window))
    return errors


MAD_OF_A_DIFFERENCE = 1.4826 / math.sqrt(2)
"""Factor from the median absolute deviation of differences to the standard deviation of normal values."""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Ratio of a median's standard error to that of a mean."""


def running(reduce: Callable[..., Floats], column: Floats, window: int) -> Floats:
    """Return the [n] reduction of the last `window` values at each step; of fewer at the start."""
    window = max(1, min(window, len(column)))
    start = np.array([reduce(column[: n + 1]) for n in range(window - 1)], dtype=np.float64)
    return np.concatenate([start, np.asarray(reduce(sliding_window_view(column, window), axis=-1), dtype=np.float64)])


def ratio(over: Floats, under: Floats) -> Floats:
    """Return [n] quotients; 0 if both are 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.nan_to_num(over / under, nan=0.0, posinf=FAR, neginf=-FAR)


FAR = 1e300
"""Value in place of a quotient that is not finite."""
