"""Links a policy loss to the function that selects its tokens over the global batch."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

TokenSelection = Callable[..., Tensor]
"""(old_logprobs [T], advantages [T], loss_mask [T], **options) of the global batch -> [T] bool."""

LossT = TypeVar("LossT", bound=Callable[..., Any])


def selects_with(select: TokenSelection) -> Callable[[LossT], LossT]:
    """Declare the function that computes `PolicyTokens.selection` for a policy loss.

    Users set the selection's keyword options together with the loss's own.
    """

    def mark(loss: LossT) -> LossT:
        loss.selection = select  # type: ignore[attr-defined]
        return loss

    return mark


def selection_of(loss: Callable[..., Any]) -> TokenSelection | None:
    """Return the function that selects tokens for a policy loss; None if it has none."""
    found: TokenSelection | None = getattr(loss, "selection", None)
    return found
