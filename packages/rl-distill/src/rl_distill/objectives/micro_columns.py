"""Access of objectives to a micro-batch's columns."""

import torch
from torch import Tensor

from rl_core.errors import DataError
from rl_distill.learner import MicroBatch
from rl_distill.objectives.shapes import check_tokens


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
