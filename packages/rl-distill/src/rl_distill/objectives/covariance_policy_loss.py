"""Policy losses with special treatment of the few tokens that reduce entropy most: Clip-Cov and KL-Cov.

At these tokens, both advantage and logprob are far above the mean, so their product, the token's share of the
covariance, is large. Tokens are selected once over the global batch from the old policy's logprobs; the selection is
the bool column `token_selection`. A token is thus treated alike in every micro-batch and every update on the batch.
(The paper selects in each micro-batch from the logprobs of the policy in training, which equal the old ones in the
first update.)

Source: Cui et al. 2025, arXiv:2505.22617, section 4.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from rl_core.errors import DataError, SettingsError
from rl_core.record_fields import NonNegativeFloat, converts_arguments
from rl_distill.objectives.policy_loss import ClipHigh, ClipLow, PolicyTokens, TokenLosses, clipped_surrogate
from rl_distill.objectives.shapes import check_mask, check_tokens

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
    return getattr(loss, "selection", None)


Share = Annotated[float, Gt(0), Le(1)]
"""Share of the trained tokens."""

Covariance = Annotated[float, Ge(-math.inf)]
"""A bound of the covariance; never NaN."""


def covariances(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return each token's share of the covariance of advantage and logprob over the global batch.

    Args:
        logprobs: [T] float logprobs under the old policy; masked values are ignored.
        advantages: [T] float; masked values are ignored.
        loss_mask: [T] bool.

    Returns:
        [T] float64, 0 where masked: (advantage - mean) * (logprob - mean).

    Raises:
        ShapeError: The shapes or dtypes do not match.
    """
    check_tokens({"logprobs": logprobs, "advantages": advantages, "loss_mask": loss_mask})
    check_mask(loss_mask)
    product = torch.ones(int(loss_mask.sum()), dtype=torch.float64, device=loss_mask.device)
    for values in (logprobs, advantages):
        kept = values[loss_mask].double()
        product = product * (kept - kept.mean())
    return torch.zeros_like(loss_mask, dtype=torch.float64).masked_scatter(loss_mask, product)


@converts_arguments
def select_band(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    share: Share = 2e-4,
    low: Covariance = 1.0,
    high: Covariance = 5.0,
    seed: int = 0,
) -> Tensor:
    """Select tokens at random among those whose covariance is within a band.

    Args:
        logprobs: [T] float logprobs under the old policy.
        advantages: [T] float.
        loss_mask: [T] bool.
        share: Selected share of the trained tokens; at least one token if the band has any.
        low: Lower bound of the covariance.
        high: Upper bound of the covariance.
        seed: Random seed; equal batches get equal selections.

    Returns:
        [T] bool, True at selected tokens.

    Raises:
        SettingsError: share is not in (0, 1], or the band is empty.
    """
    if not low < high:
        raise SettingsError(f"low of select_band must be below high; found low = {low}, high = {high}.")
    covariance = covariances(logprobs, advantages, loss_mask)
    candidates = torch.nonzero(loss_mask & (covariance > low) & (covariance < high)).flatten()
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _marked(candidates[order[: _count(loss_mask, share)].to(candidates.device)], loss_mask)


@converts_arguments
def select_top(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, share: Share = 2e-4) -> Tensor:
    """Select the tokens with the largest covariance.

    Args:
        logprobs: [T] float logprobs under the old policy.
        advantages: [T] float.
        loss_mask: [T] bool.
        share: Selected share of the trained tokens; at least one token if any is trained.

    Returns:
        [T] bool, True at selected tokens; ties go to the earlier tokens.

    Raises:
        SettingsError: share is not in (0, 1].
    """
    covariance = covariances(logprobs, advantages, loss_mask).masked_fill(~loss_mask, -torch.inf)
    order = torch.argsort(covariance, descending=True, stable=True)
    count = min(_count(loss_mask, share), int(loss_mask.sum()))
    return _marked(order[:count], loss_mask)


@selects_with(select_band)
@converts_arguments
def clip_cov(tokens: PolicyTokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2) -> TokenLosses:
    """Clip-Cov: PPO's clip, without gradient for the selected tokens.

    Args:
        tokens: Packed tokens with the selection of `select_band`.
        clip_low: See `ppo_clip`. There is no dual clip.
        clip_high: See `ppo_clip`.

    Returns:
        Losses and `actor/pg_clipfrac`, `actor/selected_fraction`, `actor/ppo_kl`.

    Raises:
        SettingsError: clip_low outside [0, 1), or clip_high below 0.
        DataError: The batch has no selection.
    """
    selection, log_ratio = _selection(tokens), tokens.log_ratio()
    losses, was_clipped = clipped_surrogate(log_ratio.exp(), tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return TokenLosses(
        losses=torch.where(selection, torch.zeros_like(losses), losses),
        diagnostics={"actor/pg_clipfrac": was_clipped, **_diagnostics(selection, log_ratio)},
    )


@selects_with(select_top)
@converts_arguments
def kl_cov(tokens: PolicyTokens, *, kl_to_old_coefficient: NonNegativeFloat = 1.0) -> TokenLosses:
    """KL-Cov: the ratio without clipping, and a penalty towards the old policy at the selected tokens.

    Args:
        tokens: Packed tokens with the selection of `select_top`.
        kl_to_old_coefficient: Weight of |log(policy / old)| at the selected tokens.

    Returns:
        Losses and `actor/selected_fraction`, `actor/ppo_kl`.

    Raises:
        SettingsError: The coefficient is below 0.
        DataError: The batch has no selection.
    """
    selection, log_ratio = _selection(tokens), tokens.log_ratio()
    pull = torch.where(selection, kl_to_old_coefficient * log_ratio.abs(), torch.zeros_like(log_ratio))
    return TokenLosses(
        losses=-tokens.advantages * log_ratio.exp() + pull, diagnostics=_diagnostics(selection, log_ratio)
    )


def _selection(tokens: PolicyTokens) -> Tensor:
    if tokens.selection is None:
        raise DataError(
            "clip_cov and kl_cov need the column 'token_selection'; the batch has none. Add it to the global batch "
            "with `with_token_selection` before splitting it into micro-batches."
        )
    return tokens.selection


def _diagnostics(selection: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    return {"actor/selected_fraction": selection.to(log_ratio.dtype), "actor/ppo_kl": -log_ratio.detach()}


def _count(loss_mask: Tensor, share: float) -> int:
    return max(1, int(share * int(loss_mask.sum())))


def _marked(tokens: Tensor, loss_mask: Tensor) -> Tensor:
    marked = torch.zeros_like(loss_mask)
    marked[tokens] = True
    return marked
