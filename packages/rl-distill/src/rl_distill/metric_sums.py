"""Sums of the objectives' metrics over the micro-batches of a rank and over ranks."""

from collections.abc import Iterable, Mapping

import numpy as np

from rl_distill.learner import MetricSums

Totals = Mapping[str, tuple[float, float]]


def metric_totals(sums: Iterable[MetricSums | Totals]) -> dict[str, tuple[float, float]]:
    """Return (weighted sum, weight) of each metric over micro-batches, or (extreme, weight) of an extreme."""
    return _joined({name: (float(value), float(weight)) for name, (value, weight) in part.items()} for part in sums)


def metric_values(totals: Iterable[Totals]) -> dict[str, float]:
    """Return weighted means and extremes over ranks, without metrics of weight 0."""
    joined = _joined(totals)
    return {name: value if _extreme(name) else value / weight for name, (value, weight) in joined.items() if weight}


def _extreme(name: str) -> np.ufunc | None:
    """Return the function that merges two extremes, keeping NaN; None for a metric that is a mean."""
    return np.maximum if name.endswith("_max") else np.minimum if name.endswith("_min") else None


def _joined(totals: Iterable[Totals]) -> dict[str, tuple[float, float]]:
    joined: dict[str, tuple[float, float]] = {}
    for part in totals:
        for name, (value, weight) in part.items():
            before, weight_before = joined.get(name, (0.0, 0.0))
            extreme = _extreme(name)
            if extreme is None:
                value += before
            elif not weight:
                value = before
            elif weight_before:
                value = float(extreme(before, value))
            joined[name] = (value, weight_before + weight)
    return joined
