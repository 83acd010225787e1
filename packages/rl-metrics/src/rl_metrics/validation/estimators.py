"""Estimators from the responses to each prompt: mean, spread, best, worst, majority and pass@k; their intervals.

An estimator maps a `ResponseTable` to [P] numbers by name, one per prompt, NaN if a prompt does not count; the metric
is their mean over prompts. Best, worst and majority of n refer to n responses drawn with replacement. Their expectation
and standard deviation are exact, while verl uses 1000 draws. The interval of such a mean is from a bootstrap over
prompts.
"""

from collections.abc import Mapping

import numpy as np

from rl_metrics.validation.majority import MAX_VOTES, vote_weights
from rl_metrics.validation.responses import NO_VOTE, Floats, Ints, ResponseTable

CHUNK = 2_000_000
"""Number of prompts drawn at once, over all draws; bounds memory."""

KEPT_BITS = 40
"""Kept bits of a value, relative to the largest of its metric; uncertain bits would split prompts of one kind."""

FEW_KINDS = 8
"""Minimum mean number of prompts per kind to draw counts of kinds instead, which is faster and has the same law."""


def estimates_of(table: ResponseTable, *, pass_threshold: float | None = None) -> dict[str, Floats]:
    """Return all estimates by the last part of the metric's name, without those in which no prompt counts."""
    with np.errstate(invalid="ignore", over="ignore"):  # huge values result in infinite means, and no spread
        estimates = mean_at_n(table) | std_at_n(table) | pass_at_k(table, threshold=pass_threshold)
        estimates |= best_at_n(table) | worst_at_n(table) | majority_at_n(table)
    return {metric: of_prompts for metric, of_prompts in estimates.items() if not np.isnan(of_prompts).all()}


def mean_at_n(table: ResponseTable) -> dict[str, Floats]:
    """Return `mean@N`, the mean of each prompt's responses."""
    return {f"mean@{table.max_count}": table.over_prompts(table.values) / table.counts}


def std_at_n(table: ResponseTable) -> dict[str, Floats]:
    """Return `std@N`, the population standard deviation of each prompt's responses, for prompts with at least two."""
    if table.max_count < 2:
        return {}
    _, deviations = _expectation(table, 1.0 / table.counts[table.prompt_of])
    return {f"std@{table.max_count}": np.where(table.counts >= 2, deviations, np.nan)}


def best_at_n(table: ResponseTable) -> dict[str, Floats]:
    """Return `best@n/mean` and `best@n/std`, of the maximum of n drawn responses, for prompts with at least n."""
    return _of_order_statistics(table, "best", table.ranks)


def worst_at_n(table: ResponseTable) -> dict[str, Floats]:
    """Return `worst@n/mean` and `worst@n/std`, of the minimum of n drawn responses, for prompts with at least n."""
    return _of_order_statistics(table, "worst", table.counts[table.prompt_of] + 1 - table.ranks)


def majority_at_n(table: ResponseTable) -> dict[str, Floats]:
    """Return `maj@n/mean` and `maj@n/std`, of the majority's value in n drawn responses, for prompts with at least n.

    The result is empty without predictions. `vote_weights` defines how ties and missing predictions count.
    """
    if (table.votes == NO_VOTE).all():
        return {}
    sizes = [size for size in subset_sizes(table.max_count) if size <= MAX_VOTES]
    return _of_weights(table, "maj", {size: vote_weights(table, size) for size in sizes})


def pass_at_k(table: ResponseTable, *, threshold: float | None = None) -> dict[str, Floats]:
    """Return `pass@k`, the unbiased probability that one of k responses passes, drawn without replacement from n.

    With c passing responses, it is 1 - C(n-c, k) / C(n, k), for prompts with n >= k. Without a threshold, the result is
    empty if no prompt has two responses, because it would equal the mean.

    Args:
        table: Responses of one variable.
        threshold: Minimum value that passes; None treats 1 as passed and 0 as failed, and returns nothing if there are
            other values.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    if threshold is None and (table.max_count < 2 or not np.isin(table.values, (0.0, 1.0)).all()):
        return {}
    passed = table.values >= (1.0 if threshold is None else threshold)
    failed = table.counts - table.over_prompts(passed.astype(np.float64))
    sizes = set(subset_sizes(table.max_count)) | {1}
    none_passed = np.ones(len(table.counts))
    found = {}
    for drawn in range(table.max_count):
        left = table.counts - drawn
        none_passed *= np.clip(failed - drawn, 0.0, None) / np.maximum(left, 1)
        if drawn + 1 in sizes:
            found[f"pass@{drawn + 1}"] = np.where(left >= 1, 1.0 - none_passed, np.nan)
    return found


def subset_sizes(max_count: int) -> list[int]:
    """Return 2, 4, 8, .. below N, and N; empty if N is 1."""
    powers = [2**power for power in range(1, max_count.bit_length()) if 2**power < max_count]
    return [*powers, max_count] if max_count >= 2 else []


def _of_order_statistics(table: ResponseTable, stem: str, ranks: Ints) -> dict[str, Floats]:
    """Weight values: that of rank r is the extreme of n draws with probability (r/N)**n - ((r-1)/N)**n."""
    counts = table.counts[table.prompt_of]
    shares, shares_below = ranks / counts, (ranks - 1) / counts
    sizes = subset_sizes(table.max_count)
    return _of_weights(table, stem, {size: shares**size - shares_below**size for size in sizes})


def _of_weights(table: ResponseTable, stem: str, weights_of: Mapping[int, Floats]) -> dict[str, Floats]:
    found = {}
    for size, weights in weights_of.items():
        mean, std = _expectation(table, weights)
        counts_here = table.counts >= size
        found[f"{stem}@{size}/mean"] = np.where(counts_here, mean, np.nan)
        found[f"{stem}@{size}/std"] = np.where(counts_here, std, np.nan)
    return found


def _expectation(table: ResponseTable, weights: Floats) -> tuple[Floats, Floats]:
    """Return the [P] mean and standard deviation of a response's value drawn with these probabilities."""
    mean = table.over_prompts(weights * table.values)
    squared = (table.values - mean[table.prompt_of]) ** 2
    return mean, np.sqrt(table.over_prompts(weights * squared))


def mean_intervals(values: Floats, *, level: float = 0.95, num_draws: int = 1000, seed: int = 0) -> Floats:
    """Return bootstrap percentile intervals of the means of several metrics over the same prompts.

    Args:
        values: [P, M] float, one number per prompt and metric; NaN if a prompt does not count in the metric.
        level: Share of the draws within the interval.
        num_draws: Number of bootstrap resamples.
        seed: Seed of the draws; equal values get equal intervals.

    Returns:
        [2, M] lower and upper ends; NaN for a metric with fewer than two prompts that count, or with an infinite one.
    """
    has_interval = ((~np.isnan(values)).sum(axis=0) >= 2) & ~np.isinf(values).any(axis=0)
    ends = np.full((2, values.shape[1]), np.nan)
    if has_interval.any():
        tail = (1.0 - level) / 2.0
        means = bootstrap_means(values[:, has_interval], num_draws=num_draws, seed=seed)
        ends[:, has_interval] = np.nanquantile(means, [tail, 1.0 - tail], axis=0)
    return ends


def bootstrap_means(values: Floats, *, num_draws: int, seed: int = 0) -> Floats:
    """Return [D, M] means of several metrics over resampled prompts; NaN if no drawn prompt counts.

    Args:
        values: [P, M] float, one number per prompt and metric; NaN if a prompt does not count in the metric.
        num_draws: D, the number of bootstrap resamples.
        seed: Seed of the draws.
    """
    counted = ~np.isnan(values)
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, 0], dtype=np.uint64)))
    columns = np.concatenate([_rounded(np.where(counted, values, 0.0)), counted], axis=1)
    kinds, counts = np.unique(columns, axis=0, return_counts=True)  # such as right and wrong, with one response each
    per_chunk = max(1, CHUNK // len(values))
    means = [
        _resampled_means(kinds, counts, min(per_chunk, num_draws - start), generator)
        for start in range(0, num_draws, per_chunk)
    ]
    return np.concatenate(means)


def _rounded(values: Floats) -> Floats:
    """Return [P, M] values without the last bits, so that draws do not depend on them."""
    shifts = KEPT_BITS - np.frexp(np.abs(values).max(axis=0))[1]
    rounded: Floats = np.ldexp(np.round(np.ldexp(values, shifts)), -shifts)
    return rounded


def _resampled_means(columns: Floats, counts: Ints, num_draws: int, generator: np.random.Generator) -> Floats:
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
