"""Validation by source and variable: values of several responses to each prompt, reduced to one number.

Prompts may have different numbers of responses: each prompt counts once, with the responses it has, and the number in
the name of `mean@N` and `std@N` is the largest. Of what needs n responses only prompts count that have as many.
"""

import re
from collections.abc import Mapping, Sequence, Set
from functools import partial

import numpy as np

from rl_metrics.validation.bootstrap import Bootstrap, mean_intervals
from rl_metrics.validation.estimators import (
    Estimator,
    best_at_n,
    majority_at_n,
    mean_at_n,
    pass_at_k,
    std_at_n,
    worst_at_n,
)
from rl_metrics.validation.responses import (
    Floats,
    ResponseTable,
    ValidationResponses,
    checked_columns,
    numbered,
    response_table,
)

__all__ = [
    "ESTIMATORS",
    "ResponseTable",
    "ValidationResponses",
    "headline",
    "is_headline_accuracy",
    "response_table",
    "summarize_validation",
]

MAIN_VARIABLES = ("acc", "reward")
"""The main variable of a source is the first of these that it has."""

CORE_STEMS = ("mean", "best", "maj", "pass")
"""Of the main variable these are in `val-core`, each with its largest number; everything else is in `val-aux`."""

ESTIMATORS: tuple[Estimator, ...] = (mean_at_n, std_at_n, pass_at_k, best_at_n, worst_at_n, majority_at_n)
"""What `summarize_validation` computes unless told otherwise."""

HEADLINE = re.compile(r"val-core/.+/mean@[0-9]+", re.DOTALL)


def summarize_validation(
    responses: ValidationResponses,
    *,
    estimators: Sequence[Estimator] | None = None,
    pass_threshold: float | None = None,
    bootstrap: Bootstrap | None = None,
) -> dict[str, float]:
    """`val-core/{source}/{variable}/mean@N` and others of each source's main variable, `val-aux/...` of all else.

    Args:
        responses: All responses of the validation.
        estimators: What to compute of each variable; None computes `ESTIMATORS`.
        pass_threshold: From which value on a response passes, for `pass@k`; None gives `pass@k` of variables whose
            values are all 0 or 1.
        bootstrap: How the intervals of the metrics in `val-core` are drawn; None draws 1000 times for 95 %.

    Returns:
        Metrics by name, the same for any order of the responses. `{metric}/ci_low` and `{metric}/ci_high` hold the
        mean over prompts, as far as which prompts were asked is chance. A missing value (NaN, or infinite) is counted
        in `val-aux/{source}/{variable}/num_missing`, and is in no mean. A variable that a source never has is left out,
        and the source's main one may be another; where no source has it, it is missing in each, and stays the main one.

    Raises:
        ShapeError: uids, sources, predictions and variables are not equally long.
        DataError: A uid or source is no text, a prediction neither text nor None, or a variable no numbers.
    """
    columns = checked_columns(responses)
    if estimators is None:
        estimators = [partial(pass_at_k, threshold=pass_threshold) if e is pass_at_k else e for e in ESTIMATORS]
    uids, sources = numbered(responses.uids), numbered(responses.sources)
    votes = None if responses.predictions is None else numbered(responses.predictions)
    is_lost = {name: bool(np.isnan(values).all()) for name, values in columns.items()}  # by all, so not by design
    metrics: dict[str, float] = {}
    for number, source in enumerate(sorted(set(responses.sources))):
        rows = np.flatnonzero(sources == number)
        metrics[f"val-aux/{source}/num_prompts"] = float(len(np.unique(uids[rows])))
        metrics[f"val-aux/{source}/num_responses"] = float(len(rows))
        of_source = {name: values[rows] for name, values in columns.items()}
        here = {name: values for name, values in of_source.items() if is_lost[name] or not np.isnan(values).all()}
        main = next((name for name in MAIN_VARIABLES if name in here), None)
        for name, values in here.items():
            num_missing = int(np.isnan(values).sum())
            if num_missing:
                metrics[f"val-aux/{source}/{name}/num_missing"] = float(num_missing)
            if is_lost[name]:
                continue
            table = response_table(values, prompt_of=uids[rows], votes=None if votes is None else votes[rows])
            found = _estimates(table, estimators)
            core = _core_names(found) if name == main else set()
            metrics |= _named(f"{source}/{name}", found, core=core)
            intervals = _intervals({m: found[m] for m in found if m in core}, bootstrap or Bootstrap())
            metrics |= {f"val-core/{source}/{name}/{metric}": value for metric, value in intervals.items()}
    return metrics


def headline(metrics: Mapping[str, float]) -> float | None:
    """One number for a validation: the mean of `val-core/.../mean@N` over sources; None when there is none."""
    values = [value for name, value in metrics.items() if HEADLINE.fullmatch(name)]
    return float(np.mean(values)) if values else None


def is_headline_accuracy(metrics: Mapping[str, float]) -> bool:
    """True where the headline is a mean of "acc" alone, and of no reward."""
    variables = {name.split("/")[-2] for name in metrics if HEADLINE.fullmatch(name)}
    return variables == {"acc"}


def _estimates(table: ResponseTable, estimators: Sequence[Estimator]) -> dict[str, Floats]:
    """Numbers of each prompt by metric; of those alone in which a prompt counts."""
    with np.errstate(invalid="ignore", over="ignore"):  # huge values give infinite means, and no spread
        found = {metric: values for estimator in estimators for metric, values in estimator(table).items()}
    return {metric: values for metric, values in found.items() if not np.isnan(values).all()}


def _named(variable: str, found: Mapping[str, Floats], *, core: Set[str]) -> dict[str, float]:
    """The means over prompts, each in its section."""
    with np.errstate(invalid="ignore"):
        means = {metric: float(np.nanmean(of_prompts)) for metric, of_prompts in found.items()}
    return {f"{'val-core' if m in core else 'val-aux'}/{variable}/{m}": value for m, value in means.items()}


def _core_names(names: Mapping[str, Floats]) -> set[str]:
    """Metrics of the main variable that are in `val-core`."""
    largest: dict[str, int] = {}
    number_of: dict[str, tuple[str, int]] = {}
    for name in names:
        match = re.match(r"([a-z]+)@([0-9]+)", name)
        if match and match[1] in CORE_STEMS:
            number_of[name] = match[1], int(match[2])
            largest[match[1]] = max(int(match[2]), largest.get(match[1], 0))
    return {name for name, (stem, number) in number_of.items() if number == largest[stem]}


def _intervals(found: Mapping[str, Floats], bootstrap: Bootstrap) -> dict[str, float]:
    """`mean@8/ci_low`, `best@8/ci_low` (of best@8/mean) and so on; none of a spread, or of a single prompt."""
    means = {name.removesuffix("/mean"): values for name, values in found.items() if not name.endswith("/std")}
    if not means:
        return {}
    low, high = mean_intervals(np.stack(list(means.values()), axis=1), bootstrap=bootstrap)
    ends = {}
    for index, name in enumerate(means):
        if not np.isnan(low[index]):
            ends[f"{name}/ci_low"] = float(low[index])
            ends[f"{name}/ci_high"] = float(high[index])
    return ends
