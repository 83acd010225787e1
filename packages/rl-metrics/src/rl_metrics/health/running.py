"""Running statistics of a series: medians, other reductions, standard errors and quotients."""

import math
from bisect import insort
from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
