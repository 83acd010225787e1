"""Comparison of two policies by their responses to the same prompts: a paired bootstrap over prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rl_core.errors import DataError
from rl_metrics.validation.estimators import bootstrap_means
from rl_metrics.validation.responses import Floats, ValidationResponses, checked_columns
from rl_metrics.validation.summary import MAIN_VARIABLES

NUM_DRAWS = 10_000
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The difference of two policies' scores on the same prompts.

    Attributes:
        num_prompts: Number of prompts with a score of both.
        a: Mean score of the first policy over these prompts.
        b: Mean score of the second policy.
        low: Lower end of the 95 % interval of b - a.
        high: Its upper end.
        p: Two-sided p-value of the hypothesis that other prompts of this kind show no difference.
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

    Each prompt counts once, with the difference of the means of its responses. Prompts are resampled, not responses:
    the interval is that of other prompts of this kind. p is the share of draws whose mean is as far from the observed
    difference as this is from 0. It is at least 2 ** (1 - m) for m prompts that differ, as in a sign test: a bootstrap
    of a few equal differences has no spread, and would call them certain.

    Args:
        a: Responses of the first policy by set.
        b: Responses of the second policy to the same sets.
        num_draws: Number of bootstrap resamples.

    Raises:
        DataError: A set has no prompt with a score of both.

    Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 16; Holm 1979,
    https://www.jstor.org/stable/4615733.
    """
    found = {name: _difference(name, a[name], b[name], num_draws=num_draws) for name in a}
    largest = 0.0
    for rank, (name, one) in enumerate(sorted(found.items(), key=lambda item: item[1].p)):
        largest = max(largest, min(1.0, (len(found) - rank) * one.p))
        found[name] = replace(one, p_holm=largest)
    return found


def _difference(name: str, a: ValidationResponses, b: ValidationResponses, *, num_draws: int) -> PairedDifference:
    variable = next((one for one in MAIN_VARIABLES if one in a.variables and one in b.variables), "")
    of_a, of_b = _scores(a, variable), _scores(b, variable)
    scores = np.array([(of_a[prompt], of_b[prompt]) for prompt in sorted(of_a.keys() & of_b.keys())])
    if not len(scores):
        raise DataError(f"the two policies have no prompt of {name!r} that both answered with a score.")
    differences = scores[:, 1] - scores[:, 0]
    drawn = bootstrap_means(differences[:, None], num_draws=num_draws)[:, 0]
    mean, num_unequal = float(differences.mean()), int(np.count_nonzero(differences))
    num_as_far = np.count_nonzero(np.abs(drawn - mean) >= abs(mean) * (1.0 - ROUNDING))
    p = min(1.0, max((1 + num_as_far) / (1 + num_draws), 2.0 ** (1 - num_unequal)))
    (mean_a, mean_b), (low, high) = scores.mean(axis=0).tolist(), np.quantile(drawn, [0.025, 0.975]).tolist()
    return PairedDifference(num_prompts=len(scores), a=mean_a, b=mean_b, low=low, high=high, p=p, p_holm=p)


def _scores(responses: ValidationResponses, variable: str) -> dict[tuple[str, str], float]:
    """Return the mean of a variable by source and uid; prompts without a value are left out."""
    rows: dict[tuple[str, str], list[float]] = {}
    values: Floats = checked_columns(responses).get(variable, np.zeros(0))
    for source, uid, value in zip(responses.sources, responses.uids, values, strict=False):
        if not np.isnan(value):
            rows.setdefault((source, uid), []).append(float(value))
    return {prompt: float(np.mean(of_prompt)) for prompt, of_prompt in rows.items()}
