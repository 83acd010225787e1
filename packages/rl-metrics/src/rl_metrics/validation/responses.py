"""Responses of a validation, and tables of one of their variables by prompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.errors import DataError, ShapeError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_VOTE = -1
"""The vote of a response without a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResponses:
    """Responses of a validation, in any order; [R] fields may be any sequence, including numpy arrays.

    Attributes:
        uids: [R] identifier of each response's prompt; the same one in two sources means two prompts.
        sources: [R] data source of each response's prompt.
        variables: [R] numbers per response, by name; NaN if missing, and infinite values count as missing. "acc" or
            "reward" is the main variable.
        predictions: [R] answer of each response, such as "42", for majority votes; None for a response without an
            answer, or instead of the sequence if there are none.
    """

    uids: Sequence[str]
    sources: Sequence[str]
    variables: Mapping[str, ArrayLike] = field(default_factory=dict)
    predictions: Sequence[str | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTable:
    """One variable in one source: the responses that have it, by prompt and then by value.

    Attributes:
        values: [V] float64, increasing within a prompt.
        prompt_of: [V] int64, row of each value's prompt, increasing from 0 to P - 1.
        counts: [P] int64, number of values of each prompt, at least 1.
        votes: [V] int64, number of each response's prediction, NO_VOTE without one.
    """

    values: Floats
    prompt_of: Ints
    counts: Ints
    votes: Ints

    @property
    def max_count(self) -> int:
        """N, the maximum number of responses of a prompt."""
        return int(self.counts.max(initial=0))

    @property
    def ranks(self) -> Ints:
        """[V] rank of each value within its prompt, from 1, the smallest."""
        starts = np.cumsum(self.counts) - self.counts
        ranks: Ints = np.arange(1, len(self.values) + 1) - starts[self.prompt_of]
        return ranks

    def over_prompts(self, weighted: Floats) -> Floats:
        """Return [P] sums of [V] numbers by prompt."""
        return np.bincount(self.prompt_of, weights=weighted, minlength=len(self.counts)).astype(np.float64)


def response_table(values: ArrayLike, *, prompt_of: ArrayLike, votes: ArrayLike | None = None) -> ResponseTable:
    """Gather values by prompt, without NaN, and without prompts that have only NaN.

    Args:
        values: [R] float, value of each response.
        prompt_of: [R] int, prompt of each value.
        votes: [R] int, number of each response's prediction, NO_VOTE without one; None without predictions.

    Returns:
        The table, independent of the order of the responses.
    """
    flat, prompts = np.asarray(values, dtype=np.float64), np.asarray(prompt_of)
    cast = np.full(flat.shape, NO_VOTE) if votes is None else np.asarray(votes, dtype=np.int64)
    is_there = ~np.isnan(flat)
    flat, prompts, cast = flat[is_there], prompts[is_there], cast[is_there]
    _, rows, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    order = np.lexsort((cast, flat, rows))
    return ResponseTable(
        values=flat[order],
        prompt_of=rows[order].astype(np.int64),
        counts=counts.astype(np.int64),
        votes=cast[order],
    )


def numbered(texts: Sequence[str | None]) -> Ints:
    """Return the [R] index of each text among the sorted distinct texts; NO_VOTE for None."""
    index: dict[str | None, int] = {text: at for at, text in enumerate(sorted({t for t in texts if t is not None}))}
    index[None] = NO_VOTE
    return np.fromiter(map(index.__getitem__, texts), dtype=np.int64, count=len(texts))


def checked_columns(responses: ValidationResponses) -> dict[str, Floats]:
    """Return the variables as arrays, with NaN for infinite values.

    Raises:
        ShapeError: The lengths of uids, sources, predictions and variables differ.
        DataError: A uid or source is not text, a prediction is neither text nor None, or a variable is not numeric.
    """
    expected = (len(responses.uids),)
    columns = {name: _numbers(name, values) for name, values in responses.variables.items()}
    shapes: dict[str, tuple[int, ...]] = {"sources": (len(responses.sources),)}
    if responses.predictions is not None:
        shapes["predictions"] = (len(responses.predictions),)
    for name, shape in (shapes | {name: values.shape for name, values in columns.items()}).items():
        if shape != expected:
            raise ShapeError(
                f"{name} must have uids' shape {list(expected)}; found {list(shape)}. Pass one value per "
                f"response, {'None' if name == 'predictions' else 'NaN'} if it is missing."
            )
    for name, texts in (("uids", responses.uids), ("sources", responses.sources)):
        if others := _other_types(texts, str):
            raise DataError(
                f"{name} must be text; found {', '.join(sorted(others))}. Pass one per response, such as "
                f"{'str(index) of its prompt' if name == 'uids' else 'the name of its data set'}."
            )
    predictions = () if responses.predictions is None else responses.predictions
    if others := _other_types(predictions, str, NoneType):
        raise DataError(
            f"predictions must be text, or None if missing; found {', '.join(sorted(others))}. Convert each answer to "
            "text, such as str(answer)."
        )
    return columns


def _other_types(values: Iterable[object], *allowed: type) -> set[str]:
    return {found.__name__ for found in set(map(type, values)) if not issubclass(found, allowed)}


def _numbers(name: str, values: ArrayLike) -> Floats:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"variable {name!r} must have a number for each response, NaN if it is missing; {error}."
        ) from None
    return np.where(np.isfinite(numbers), numbers, np.nan)
