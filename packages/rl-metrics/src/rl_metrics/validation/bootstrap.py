"""Bootstrap confidence intervals of means over prompts."""

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray

from rl_core.record_fields import NonNegativeInt, settings_record
from rl_metrics.validation.responses import Floats

IntArray = NDArray[np.int64]

CHUNK = 2_000_000
"""Number of prompts drawn at once, over all draws; bounds memory."""

KEPT_BITS = 40
"""Kept bits of a value, relative to the largest of its metric; uncertain bits would split prompts of one kind."""

FEW_KINDS = 8
"""Minimum mean number of prompts per kind to draw counts of kinds instead, which is faster and has the same law."""


@settings_record
class Bootstrap:
    """Options of bootstrap intervals.

    Attributes:
        level: Share of the draws within the interval.
        num_draws: Number of bootstrap resamples; 0 computes no intervals.
        seed: Seed of the draws; equal values get equal intervals.
    """

    level: Annotated[float, Gt(0), Lt(1)] = 0.95
    num_draws: NonNegativeInt = 1000
    seed: Annotated[int, Ge(0), Lt(2**64)] = 0


def mean_intervals(values: Floats, *, bootstrap: Bootstrap) -> Floats:
    """Return percentile intervals of the means of several metrics over the same prompts.

    Args:
        values: [P, M] float, one number per prompt and metric; NaN if a prompt does not count in the metric.
        bootstrap: Options of the bootstrap.

    Returns:
        [2, M] lower and upper ends; NaN for a metric with fewer than two prompts that count, or with an infinite one.
    """
    num_prompts, num_metrics = values.shape
    counted = ~np.isnan(values)
    has_interval = (counted.sum(axis=0) >= 2) & ~np.isinf(values).any(axis=0)
    if not bootstrap.num_draws or not has_interval.any():
        return np.full((2, num_metrics), np.nan)
    generator = np.random.Generator(np.random.Philox(key=np.array([bootstrap.seed, 0], dtype=np.uint64)))
    columns = np.concatenate([_rounded(np.where(counted & has_interval, values, 0.0)), counted], axis=1)
    kinds, counts = np.unique(columns, axis=0, return_counts=True)  # such as right and wrong, with one response each
    per_chunk = max(1, CHUNK // num_prompts)
    means = [
        _resampled_means(kinds, counts, min(per_chunk, bootstrap.num_draws - start), generator)
        for start in range(0, bootstrap.num_draws, per_chunk)
    ]
    tail = (1.0 - bootstrap.level) / 2.0
    drawn = np.where(has_interval, np.concatenate(means), 0.0)
    ends = np.nanquantile(drawn, [tail, 1.0 - tail], axis=0)
    return np.where(has_interval, ends, np.nan)


def _rounded(values: Floats) -> Floats:
    """Return [P, M] values without the last bits, so that draws do not depend on them."""
    shifts = KEPT_BITS - np.frexp(np.abs(values).max(axis=0))[1]
    rounded: Floats = np.ldexp(np.round(np.ldexp(values, shifts)), -shifts)
    return rounded


def _resampled_means(columns: Floats, counts: IntArray, num_draws: int, generator: np.random.Generator) -> Floats:
    """Return [D, M] means of resampled prompts; NaN if a draw has no prompt that counts.

    Args:
        columns: [K, 2 M] kinds of prompts: values, and 1 if they count, else 0.
        counts: [K] number of prompts of each kind.
        num_draws: Number of resamples.
        generator: Random generator.
    """
    num_kinds, num_metrics, num_prompts = len(columns), columns.shape[1] // 2, int(counts.sum())
    if num_kinds * FEW_KINDS <= num_prompts:
        times = generator.multinomial(num_prompts, counts / num_prompts, size=num_draws)
    else:
        chosen = np.repeat(np.arange(num_kinds), counts)[generator.integers(num_prompts, size=(num_draws, num_prompts))]
        chosen += np.arange(num_draws)[:, None] * num_kinds
        times = np.bincount(chosen.ravel(), minlength=num_draws * num_kinds).reshape(num_draws, num_kinds)
    sums = times.astype(np.float64) @ columns
    weights = sums[:, num_metrics:]
    means: Floats = np.divide(sums[:, :num_metrics], weights, out=np.full(weights.shape, np.nan), where=weights > 0)
    return means
