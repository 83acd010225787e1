"""Validation by source and variable: values of several responses to each prompt, reduced to one number.

An estimator takes a `ResponseTable` (prompts by responses) and gives metrics such as {"mean@8": 0.5}. Prompts may
have different numbers of responses: each prompt counts once, with the responses it has, and the number in the name
is the largest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.errors import ShapeError

FloatMatrix = NDArray[np.float64]

MAIN_VARIABLES = ("acc", "reward")
"""The main variable of a source is the first of these that it has."""

CORE_PREFIXES = ("mean@",)
"""Metrics of the main variable that are in `val-core`; everything else is in `val-aux`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResponses:
    """Responses of a validation, in any order.

    Attributes:
        uids: [R] uid of each response's prompt; one uid in two sources is two prompts.
        sources: [R] data source of each response's prompt.
        variables: Numbers of each response by name, [R] each; NaN where a response has none. "acc" or "reward" is
            the main one.
    """

    uids: Sequence[str]
    sources: Sequence[str]
    variables: Mapping[str, ArrayLike] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTable:
    """Values of one variable in one source, a row for each prompt that has any.

    Attributes:
        values: [P, N] float64; row p holds counts[p] values and then NaN.
        counts: [P] int64, each at least 1.
    """

    values: FloatMatrix
    counts: NDArray[np.int64]

    @property
    def max_count(self) -> int:
        """N, the largest number of responses of a prompt."""
        return int(self.values.shape[1])


Estimator = Callable[[ResponseTable], Mapping[str, float]]
"""A validation metric; the key is the last part of its name. It returns nothing where it is not defined."""


def mean_at_n(table: ResponseTable) -> dict[str, float]:
    """`mean@N`: mean of each prompt's responses, then over prompts."""
    return {f"mean@{table.max_count}": float(_prompt_means(table).mean())}


def std_at_n(table: ResponseTable) -> dict[str, float]:
    """`std@N`: population standard deviation of each prompt's responses, mean over prompts with at least two."""
    several = table.counts >= 2
    if not several.any():
        return {}
    squared = np.where(np.isnan(table.values), 0.0, (table.values - _prompt_means(table)[:, None]) ** 2)
    deviations = np.sqrt(squared.sum(axis=1) / table.counts)
    return {f"std@{table.max_count}": float(deviations[several].mean())}


ESTIMATORS: tuple[Estimator, ...] = (mean_at_n, std_at_n)
"""What `summarize_validation` computes unless told otherwise."""


def summarize_validation(
    responses: ValidationResponses, *, estimators: Sequence[Estimator] = ESTIMATORS
) -> dict[str, float]:
    """`val-core/{source}/{variable}/mean@N` of each source's main variable, `val-aux/...` of everything else.

    Args:
        responses: All responses of the validation.
        estimators: What to compute of each variable.

    Returns:
        Metrics by name. A missing value (NaN) is counted in `val-aux/{source}/{variable}/num_missing`, and is in no
        mean; a variable that a source never has is left out there.

    Raises:
        ShapeError: uids, sources and variables are not equally long.
    """
    columns = _checked_columns(responses)
    uids, sources = np.asarray(responses.uids, dtype=np.str_), np.asarray(responses.sources, dtype=np.str_)
    metrics: dict[str, float] = {}
    for source in np.unique(sources) if len(sources) else ():
        rows = np.flatnonzero(sources == source)
        names, prompt_of = np.unique(uids[rows], return_inverse=True)
        metrics[f"val-aux/{source}/num_prompts"] = float(len(names))
        metrics[f"val-aux/{source}/num_responses"] = float(len(rows))
        here = {name: values[rows] for name, values in columns.items() if not np.isnan(values[rows]).all()}
        main = next((name for name in MAIN_VARIABLES if name in here), None)
        for name, values in here.items():
            num_missing = int(np.isnan(values).sum())
            if num_missing:
                metrics[f"val-aux/{source}/{name}/num_missing"] = float(num_missing)
            table = response_table(values, prompt_of=prompt_of)
            for estimator in estimators:
                for metric, value in estimator(table).items():
                    is_core = name == main and metric.startswith(CORE_PREFIXES)
                    metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    return metrics


def headline(metrics: Mapping[str, float]) -> float | None:
    """One number for a validation: the mean of `val-core/.../mean@N` over sources; None when there is none."""
    values = [value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name]
    return float(np.mean(values)) if values else None


def response_table(values: ArrayLike, *, prompt_of: ArrayLike) -> ResponseTable:
    """Put values beside each other by prompt, in their order; NaN is left out.

    Args:
        values: [R] float.
        prompt_of: [R] int, the prompt of each value.
    """
    flat, prompts = np.asarray(values, dtype=np.float64), np.asarray(prompt_of)
    is_there = ~np.isnan(flat)
    flat, prompts = flat[is_there], prompts[is_there]
    _, row_of, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    order = np.argsort(row_of, kind="stable")
    starts = np.cumsum(counts) - counts
    position = np.arange(len(flat)) - starts[row_of[order]]
    matrix = np.full((len(counts), int(counts.max(initial=0))), np.nan)
    matrix[row_of[order], position] = flat[order]
    return ResponseTable(values=matrix, counts=counts.astype(np.int64))


def _prompt_means(table: ResponseTable) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.nansum(table.values, axis=1)
    return sums / table.counts


def _checked_columns(responses: ValidationResponses) -> dict[str, NDArray[np.float64]]:
    expected = (len(responses.uids),)
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in responses.variables.items()}
    shapes = {"sources": (len(responses.sources),)} | {name: values.shape for name, values in columns.items()}
    for name, shape in shapes.items():
        if shape != expected:
            raise ShapeError(
                f"{name} must have uids' shape {list(expected)}; found {list(shape)}. Give one value for each "
                "response, NaN where there is none."
            )
    return columns
