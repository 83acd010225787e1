"""Robust trend statistics: significance and slope."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def theil_sen(x: Floats, y: Floats) -> float:
    """Return the median slope of all pairs of points; 0 for fewer than two points.

    Args:
        x: [n] increasing positions.
        y: [n] values at these positions.

    Source: Sen 1968, https://doi.org/10.1080/01621459.1968.10480934.
    """
    first, second = np.triu_indices(len(y), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first]))) if len(first) else 0.0


def mann_kendall_z(column: Floats) -> float:
    """Return the Mann-Kendall z of a column: positive if it rises, negative if it falls; normal without a trend."""
    n = len(column)
    if n < 3:
        return 0.0
    first, second = np.triu_indices(n, k=1)
    rising = float(np.sign(column[second] - column[first]).sum())
    _, ties = np.unique(column, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1.0) * (2 * ties + 5)).sum())) / 18
    return (rising - math.copysign(1.0, rising)) / math.sqrt(variance) if rising and variance > 0 else 0.0
