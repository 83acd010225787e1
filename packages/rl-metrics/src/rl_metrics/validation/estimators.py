"""What is estimated from the responses to each prompt: mean, spread, best, worst, majority and pass@k.

An estimator takes a `ResponseTable` and gives [P] numbers by name, one of each prompt, NaN where a prompt does not
count; the metric is their mean over prompts. Best, worst and majority of n are those of n responses drawn with
replacement: their expectation and standard deviation exactly, where verl takes 1000 draws.
"""

from collections.abc import Callable, Mapping

import numpy as np

from rl_metrics.validation.majority import MAX_VOTES, vote_weights
from rl_metrics.validation.responses import NO_VOTE, Floats, Ints, ResponseTable

Estimator = Callable[[ResponseTable], Mapping[str, Floats]]
"""A validation metric: the key is the last part of its name, the value a number of each prompt, NaN where none."""


def mean_at_n(table: ResponseTable) -> dict[str, Floats]:
    """`mean@N`: mean of each prompt's responses."""
    return {f"mean@{table.max_count}": table.over_prompts(table.values) / table.counts}


def std_at_n(table: ResponseTable) -> dict[str, Floats]:
    """`std@N`: population standard deviation of each prompt's responses, of prompts with at least two."""
    if table.max_count < 2:
        return {}
    _, deviations = _expectation(table, 1.0 / table.counts[table.prompt_of])
    return {f"std@{table.max_count}": np.where(table.counts >= 2, deviations, np.nan)}


def best_at_n(table: ResponseTable) -> dict[str, Floats]:
    """`best@n/mean` and `best@n/std`: the largest of n drawn responses, of prompts with at least n."""
    return _of_order_statistics(table, "best", table.ranks)


def worst_at_n(table: ResponseTable) -> dict[str, Floats]:
    """`worst@n/mean` and `worst@n/std`: the smallest of n drawn responses, of prompts with at least n."""
    return _of_order_statistics(table, "worst", table.counts[table.prompt_of] + 1 - table.ranks)


def majority_at_n(table: ResponseTable) -> dict[str, Floats]:
    """`maj@n/mean` and `maj@n/std`: the value of the majority of n drawn responses, of prompts with at least n.

    Nothing without predictions. `vote_weights` says how ties and missing predictions count.
    """
    if table.votes is None or (table.votes == NO_VOTE).all():
        return {}
    sizes = [size for size in subset_sizes(table.max_count) if size <= MAX_VOTES]
    return _of_weights(table, "maj", {size: vote_weights(table, size) for size in sizes})


def pass_at_k(table: ResponseTable, *, threshold: float | None = None) -> dict[str, Floats]:
    """`pass@k`: how likely one of k responses passes, k of a prompt's n drawn without replacement; unbiased.

    With c responses that pass it is 1 - C(n-c, k) / C(n, k), of prompts with n >= k. Nothing of 0/1 values where
    no prompt has two responses: there it is the mean.

    Args:
        table: Any.
        threshold: A value from here on passes; None takes 1 for passed and 0 for failed, and gives nothing where
            there are other values.

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
    """2, 4, 8, .. below N, and N; empty where N is 1."""
    powers = [2**power for power in range(1, max_count.bit_length()) if 2**power < max_count]
    return [*powers, max_count] if max_count >= 2 else []


def _of_order_statistics(table: ResponseTable, stem: str, ranks: Ints) -> dict[str, Floats]:
    """The value of rank r is the extreme of n drawn ones with chance (r/N)**n - ((r-1)/N)**n."""
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
    """[P] mean and standard deviation of a response's value that is drawn with these probabilities."""
    mean = table.over_prompts(weights * table.values)
    squared = (table.values - mean[table.prompt_of]) ** 2
    return mean, np.sqrt(table.over_prompts(weights * squared))
