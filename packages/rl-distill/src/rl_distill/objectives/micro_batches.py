"""What objectives read of a micro-batch: its columns, and comparisons with teachers that they request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_core.errors import DataError
from rl_distill.learner import MicroBatch
from rl_distill.objectives.divergences import DivergenceOptions
from rl_distill.objectives.shapes import check_tokens

MEASURED = "distillation/"
"""Prefix of the measures' column names."""
LOSSES = MEASURED + "losses"
"""Column with each token's divergence; it has a gradient unless the comparison is alone."""
WEIGHTED = MEASURED + "weighted"
"""Column with losses times `loss_weights`, with gradient, to be summed; present only if the comparison is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherComparison:
    """The comparison that an objective requests.

    Attributes:
        options: Options of the divergence.
        is_alone: The loss has no other term. Logprobs and entropy then need no gradient, and the divergence is computed
            in one pass that neither stores all logits nor computes them twice.
    """

    options: DivergenceOptions
    is_alone: bool


def comparison_of(objective: Any) -> TeacherComparison | None:
    """Return the comparison that an objective requests; None if it only needs logprobs."""
    return getattr(objective, "comparison", None)


def with_columns(micro: MicroBatch, measured: Mapping[str, Tensor]) -> MicroBatch:
    """Return a micro-batch with these columns added."""
    return replace(micro, columns={**micro.columns, **measured}) if measured else micro


def needed_column(micro: MicroBatch, name: str, *, who: str) -> Tensor:
    """Return a column of the micro-batch.

    Args:
        micro: The micro-batch.
        name: Name of the column.
        who: User of the column, for the message.

    Raises:
        DataError: The column is missing.
    """
    try:
        return micro.columns[name]
    except KeyError:
        found = ", ".join(sorted(micro.columns)) or "none"
        raise DataError(f"{who} needs the column {name!r}; the micro-batch has {found}.") from None


def masked(values: Tensor, mask: Tensor, *, name: str) -> Tensor:
    """Return values [T], 0 where the mask [T] is False, so that neither NaN nor a gradient passes.

    Raises:
        ShapeError: The values are not [T]; the message has `name`.
    """
    check_tokens({"loss_mask": mask, name: values})
    return torch.where(mask, values, torch.zeros_like(values))
