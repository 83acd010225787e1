"""Comparison of two policies by their responses to the same prompts: a sign-flip permutation test over prompts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rl_metrics.validation.responses import Floats, ValidationResponses, checked_columns
from rl_metrics.validation.summary import MAIN_VARIABLES

NUM_DRAWS = 10_000
MAX_EXACT = 12
"""Maximum number of prompts for all 2 ** 12 flips; with more prompts, flips are drawn."""

ALPHA = 0.05
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The difference of two policies' scores on the same prompts.

    Attributes:
        num_prompts: Number of prompts with a score of both.
        a: Mean score of the first policy over these prompts.
        b: Mean score of the second policy.
        low: Lower end of the 95 % interval of b - a, which excludes 0 exactly if p < 0.05; -inf below 6 prompts.
        high: Its upper end; inf below 6 prompts.
        p: Two-sided p-value of the hypothesis that the policies are alike: each prompt's difference is as likely with
            the opposite sign.
        p_holm: The same, adjusted for the number of sets that were compared.
    """

    num_prompts: int
    a: float
    b: float
    low: float
    high: float
    p: float
    p_holm: float


def paired_differences(
    a: Mapping[str, ValidationResponses], b: Mapping[str, ValidationResponses], *, num_draws: int = NUM_DRAWS
) -> dict[str, PairedDifference]:
    """Compare the main variable of two policies on each set, by prompt.

    Each prompt counts once, with the difference of the means of its responses. p is the share of sign flips of these
    differences whose mean is at least as far from 0: of all flips up to 12 prompts, else of random ones and the
    observed one. The interval holds the differences that the same test does not reject, so it and p never contradict
    each other. A set without a prompt that has a score of both is left out, and does not count in Holm's correction.

    Args:
        a: Responses of the first policy by set.
        b: Responses of the second policy to the same sets.
        num_draws: Number of random flips.

    Source: Hartigan 1969, JASA 64, p. 1303; Phipson & Smyth 2010, arXiv:1603.05766 (the
    observed flip counts); Holm 1979, https://www.jstor.org/stable/4615733.
    """
    compared = {name: _difference(a[name], b[name], num_draws=num_draws) for name in a}
    found = {name: one for name, one in compared.items() if one is not None}
    largest = 0.0
    for rank, (name, one) in enumerate(sorted(found.items(), key=lambda item: item[1].p)):
        largest = max(largest, min(1.0, (len(found) - rank) * one.p))
        found[name] = replace(one, p_holm=largest)
    return found


def _difference(a: ValidationResponses, b: ValidationResponses, *, num_draws: int) -> PairedDifference | None:
    variable = next((one for one in MAIN_VARIABLES if one in a.variables and one in b.variables), "")
    of_a, of_b = _scores(a, variable), _scores(b, variable)
    scores = np.array([(of_a[prompt], of_b[prompt]) for prompt in sorted(of_a.keys() & of_b.keys())])
    if not len(scores):
        return None
    lows, highs = _flip_ranges(scores[:, 1] - scores[:, 0], num_draws=num_draws)
    p = float(np.mean((lows <= 0.0) & (highs >= 0.0)))
    num_rejected = math.ceil(ALPHA * len(lows)) - 1
    low, high = float(np.sort(lows)[num_rejected]), float(np.sort(highs)[-1 - num_rejected])
    mean_a, mean_b = scores.mean(axis=0).tolist()
    return PairedDifference(num_prompts=len(scores), a=mean_a, b=mean_b, low=low, high=high, p=p, p_holm=p)


def _flip_ranges(differences: Floats, *, num_draws: int) -> tuple[Floats, Floats]:
    """Return both [D] ends of the true differences for which a flip is at least as far from them as the observed mean.

    With the signs of a subset of `differences - true` flipped, their mean is at least as far from 0 if and only if
    `true` is between the mean of the subset and that of the rest. Flips of none or of all always are.
    """
    num_prompts = len(differences)
    if num_prompts <= MAX_EXACT:
        chosen = np.arange(2**num_prompts)[:, None] >> np.arange(num_prompts) & 1
        sums, sizes = chosen @ differences, chosen.sum(axis=1)
    else:
        kinds, counts = np.unique(differences, return_counts=True)
        generator = np.random.Generator(np.random.Philox(key=np.zeros(2, dtype=np.uint64)))
        drawn = (generator.binomial(counts, 0.5) for _ in range(num_draws))
        sums, sizes = np.array([(0.0, 0.0), *((times @ kinds, times.sum()) for times in drawn)]).T  # none: as observed
    means = np.stack([sums, differences.sum() - sums]) / np.maximum([sizes, num_prompts - sizes], 1)
    means[np.abs(means) <= ROUNDING * np.abs(differences).max()] = 0.0
    means[:, (sizes == 0) | (sizes == num_prompts)] = [[-np.inf], [np.inf]]
    return means.min(axis=0), means.max(axis=0)


def _scores(responses: ValidationResponses, variable: str) -> dict[tuple[str, str], float]:
    """Return the mean of a variable by source and uid; prompts without a value are left out."""
    rows: dict[tuple[str, str], list[float]] = {}
    values: Floats = checked_columns(responses).get(variable, np.empty(0))
    for source, uid, value in zip(responses.sources, responses.uids, values, strict=False):
        if not np.isnan(value):
            rows.setdefault((source, uid), []).append(float(value))
    return {prompt: float(np.mean(of_prompt)) for prompt, of_prompt in rows.items()}
