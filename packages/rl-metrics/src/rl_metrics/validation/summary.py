"""Validation by source and variable, from several responses to each prompt.

Prompts may have different numbers of responses. Each prompt counts once, with its responses, and N in the names
`mean@N` and `std@N` is the maximum. Estimates that need n responses use only prompts with as many.
"""

import re
from collections.abc import Mapping

import numpy as np

from rl_metrics.validation.estimators import estimates_of, mean_intervals
from rl_metrics.validation.responses import Floats, ValidationResponses, checked_columns, numbered, response_table

MAIN_VARIABLES = ("acc", "reward")
"""Candidates for the main variable; the first that a source has is used."""

CORE_STEMS = ("mean", "best", "maj", "pass")
"""Estimates of the main variable in `val-core`, each with its largest n; all others are in `val-aux`."""

HEADLINE = re.compile(r"val-core/.+/mean@[0-9]+", re.DOTALL)


def summarize_validation(responses: ValidationResponses, *, pass_threshold: float | None = None) -> dict[str, float]:
    """Return `val-core/{source}/{variable}/...` for each source's main variable, and `val-aux/...` for all else.

    Args:
        responses: All responses of the validation.
        pass_threshold: Minimum value that passes, for `pass@k`; None computes `pass@k` only for variables whose values
            are all 0 or 1.

    Returns:
        Metrics by name, independent of the order of the responses. `{metric}/ci_low` and `{metric}/ci_high` are the
        95 % interval of the mean over prompts, for a random choice of prompts. A missing value (NaN or infinite) is
        counted in `val-aux/{source}/{variable}/num_missing`, and excluded from means. If fewer prompts than the source
        has have the responses that a core metric needs, `val-aux/{source}/{variable}/{metric}/num_prompts` is their
        number. A variable that a source never has is left out, so its main variable may differ. A variable that no
        source has counts as missing in each, and remains the main one.

    Raises:
        ShapeError: The lengths of uids, sources, predictions and variables differ.
        DataError: A uid or source is not text, a prediction is neither text nor None, or a variable is not numeric.
    """
    columns = checked_columns(responses)
    uids, sources = numbered(responses.uids), numbered(responses.sources)
    votes = None if responses.predictions is None else numbered(responses.predictions)
    is_lost = {name: bool(np.isnan(values).all()) for name, values in columns.items()}  # everywhere, not by design
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
            estimates = estimates_of(table, pass_threshold=pass_threshold)
            core = _core_names(estimates) if name == main else set()
            for metric, of_prompts in estimates.items():
                with np.errstate(invalid="ignore"):
                    mean = float(np.nanmean(of_prompts))
                metrics[f"{'val-core' if metric in core else 'val-aux'}/{source}/{name}/{metric}"] = mean
            with_interval = [metric for metric in estimates if metric in core and not metric.endswith("/std")]
            means = {metric.removesuffix("/mean"): estimates[metric] for metric in with_interval}
            for metric, value in _intervals(means).items():
                metrics[f"val-core/{source}/{name}/{metric}"] = value
            for metric, of_prompts in means.items():
                if (num_counted := float((~np.isnan(of_prompts)).sum())) < metrics[f"val-aux/{source}/num_prompts"]:
                    metrics[f"val-aux/{source}/{name}/{metric}/num_prompts"] = num_counted
    return metrics


def headline(metrics: Mapping[str, float]) -> float | None:
    """Return one number for a validation: the mean of `val-core/.../mean@N` over sources, or None without one."""
    values = [value for name, value in metrics.items() if HEADLINE.fullmatch(name)]
    return float(np.mean(values)) if values else None


def headline_name(metrics: Mapping[str, float]) -> str:
    """Return what `headline` measures: "accuracy" (acc), "mean_reward", or "score" if the sources differ."""
    variables = {name.split("/")[-2] for name in metrics if HEADLINE.fullmatch(name)}
    return {"acc": "accuracy", "reward": "mean_reward"}[variables.pop()] if len(variables) == 1 else "score"


def _core_names(names: Mapping[str, Floats]) -> set[str]:
    """Return the metrics of the main variable that belong to `val-core`."""
    largest: dict[str, int] = {}
    number_of: dict[str, tuple[str, int]] = {}
    for name in names:
        stem, _, rest = name.partition("@")
        if stem in CORE_STEMS:
            number = int(rest.partition("/")[0])
            number_of[name] = stem, number
            largest[stem] = max(number, largest.get(stem, 0))
    return {name for name, (stem, number) in number_of.items() if number == largest[stem]}


def _intervals(means: Mapping[str, Floats]) -> dict[str, float]:
    """Return `mean@8/ci_low`, `best@8/ci_low` (of best@8/mean) and so on; none for a single prompt."""
    if not means:
        return {}
    low, high = mean_intervals(np.stack(list(means.values()), axis=1))
    ends = {}
    for index, name in enumerate(means):
        if not np.isnan(low[index]):
            ends[f"{name}/ci_low"] = float(low[index])
            ends[f"{name}/ci_high"] = float(high[index])
    return ends
