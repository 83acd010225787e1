"""Access to a micro-batch's columns for objectives."""

import torch
from torch import Tensor

from rl_core.errors import DataError
from rl_distill.learner import MicroBatch
from rl_distill.objectives.shapes import check_tokens


def needed_column(micro: MicroBatch, name: str, *, who: str) -> Tensor:
    """Return the [T] column of a name.

    Args:
        micro: The micro-batch.
        name: Name of the column.
        who: The column's user, for the message.

    Raises:
        DataError: The column is missing.
    """
    try:
        return micro.columns[name]
    except KeyError:
        found = ", ".join(sorted(micro.columns)) or "none"
        raise DataError(f"{who} needs the column {name!r}; the micro-batch has {found}.") from None


def masked(values: Tensor, mask: Tensor, *, name: str) -> Tensor:
    """Return [T] values, 0 where the mask [T] is False, so that neither NaN nor a gradient passes.

    Raises:
        ShapeError: The values are not [T]; the message has their name.
    """
    check_tokens({"loss_mask": mask, name: values})
    return torch.where(mask, values, torch.zeros_like(values))
