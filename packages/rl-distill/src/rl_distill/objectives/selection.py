"""Policy losses that treat some tokens apart name the function that selects them over the global batch."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

TokenSelection = Callable[..., Tensor]
"""(old_logprobs [T], advantages [T], loss_mask [T], **options) of the global batch -> [T] bool."""

LossT = TypeVar("LossT", bound=Callable[..., Any])


def selects_with(select: TokenSelection) -> Callable[[LossT], LossT]:
    """Mark a policy loss as one that needs `PolicyTokens.selection`, and say how it is made.

    The selection's keyword options are set with the loss's own.
    """

    def mark(loss: LossT) -> LossT:
        loss.selection = select  # type: ignore[attr-defined]
        return loss

    return mark


def selection_of(loss: Callable[..., Any]) -> TokenSelection | None:
    """The function that selects tokens for a policy loss, or None where it needs none."""
    found: TokenSelection | None = getattr(loss, "selection", None)
    return found
