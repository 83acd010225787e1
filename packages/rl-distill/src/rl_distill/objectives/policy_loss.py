"""The interface of policy losses on packed tokens, and PPO's clip.

Others are in `policy_losses` and `covariance_policy_loss`.

Source: PPO's clip, Schulman et al. 2017, arXiv:1707.06347; separate clip_high, DAPO, Yu et al. 2025,
arXiv:2503.14476; dual clip, Ye et al. 2020, arXiv:1912.09729.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from rl_core.record_fields import converts_arguments, record
from rl_distill.objectives.kl import bounded
from rl_distill.objectives.ragged import padded_offsets
from rl_distill.objectives.shapes import (
    as_mask,
    check_mask,
    check_offsets,
    check_padded,
    check_tokens,
    refuse_nested,
    refuse_probabilities,
)

ClipLow = Annotated[float, Ge(0), Lt(1)]
"""Lower clip range: ratios are clipped at 1 - clip_low, which must be above 0."""

ClipHigh = Annotated[float, Ge(0)]
"""Upper clip range: ratios are clipped at 1 + clip_high."""


@record
class PolicyTokens:
    """Inputs of a policy loss: complete trajectories packed end to end.

    The three float tensors are set to 0 outside loss_mask, so that neither values nor gradients pass. Only
    policy_logprobs keep their gradient.

    Attributes:
        policy_logprobs: [T] float.
        old_logprobs: [T] float logprobs under the policy before this batch's updates.
        advantages: [T] float.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.
        selection: [T] bool, True at tokens that the loss treats separately; None without a selection. It is computed
            over the global batch (see `covariance_policy_loss`), so it does not depend on micro-batches.
    """

    policy_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    offsets: Tensor
    selection: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, and set masked values to 0."""
        floats = ("policy_logprobs", "old_logprobs", "advantages")
        if self.selection is not None:
            check_tokens({"loss_mask": self.loss_mask, "selection": self.selection})
            object.__setattr__(self, "selection", (self.selection > 0) & self.loss_mask)
        num_tokens = check_tokens({name: getattr(self, name) for name in (*floats, "loss_mask")})
        check_mask(self.loss_mask)
        check_offsets(self.offsets, num_tokens=num_tokens)
        for name in floats:
            value: Tensor = getattr(self, name)
            blanked = torch.where(self.loss_mask, value, torch.zeros_like(value))
            object.__setattr__(self, name, blanked if name == "policy_logprobs" else blanked.detach())

    @classmethod
    @converts_arguments
    def from_padded(
        cls,
        policy_logprobs: Tensor,
        loss_mask: Tensor,
        *,
        advantages: Tensor,
        old_logprobs: Tensor | None = None,
        selection: Tensor | None = None,
    ) -> "PolicyTokens":
        """Create packed tokens from rows [B, T] padded on either side.

        Args:
            policy_logprobs: [B, T] float, with gradient.
            loss_mask: [B, T] bool, or integers that are nonzero at trained tokens.
            advantages: [B, T], or [B] with one value for all tokens of a row.
            old_logprobs: [B, T]; None uses policy_logprobs without gradient, for the first update on a batch.
            selection: [B, T] bool, see `PolicyTokens.selection`.

        Raises:
            ShapeError: A tensor is not [B, T], or the mask is a float tensor.
            DataError: A logprob of a trained token is above 0 (checked on CPUs only).
        """
        refuse_nested(policy_logprobs=policy_logprobs, loss_mask=loss_mask, advantages=advantages)
        refuse_nested(old_logprobs=old_logprobs, selection=selection)
        loss_mask = as_mask(loss_mask)
        padded = {
            "policy_logprobs": policy_logprobs,
            "loss_mask": loss_mask,
            "advantages": advantages[:, None].expand(-1, loss_mask.shape[-1]) if advantages.ndim == 1 else advantages,
            "old_logprobs": policy_logprobs if old_logprobs is None else old_logprobs,
        } | ({} if selection is None else {"selection": selection})
        check_padded(padded)
        for name in ("policy_logprobs", "old_logprobs"):
            refuse_probabilities(padded[name], loss_mask, name)
        return cls(**{name: tensor.reshape(-1) for name, tensor in padded.items()}, offsets=padded_offsets(loss_mask))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.loss_mask)

    def log_ratio(self) -> Tensor:
        """Return [T] log(policy / old), clamped to `LOG_RATIO_BOUND`."""
        return bounded(self.policy_logprobs - self.old_logprobs)


@record
class TokenLosses:
    """Result of a policy loss.

    Attributes:
        losses: [T] losses, to be summed with the tokens' weights; values outside loss_mask are ignored.
        diagnostics: [T] values by metric name, without gradient, to be averaged over trained tokens.
    """

    losses: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[..., TokenLosses]
"""(PolicyTokens, **options) -> TokenLosses.

A token's loss may depend on its own trajectory, but on no other, so that the losses of micro-batches add up.
"""


@converts_arguments
def ppo_clip(
    tokens: PolicyTokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: Annotated[float, Gt(1)] = 3.0,
) -> TokenLosses:
    """PPO's clipped surrogate with dual clip.

    Args:
        tokens: Packed tokens.
        clip_low: Ratios below 1 - clip_low get no gradient where the advantage is negative.
        clip_high: Ratios above 1 + clip_high get no gradient where the advantage is positive.
        dual_clip: The loss at negative advantages is at most dual_clip * |advantage|; math.inf disables this bound.

    Returns:
        Losses and `actor/pg_clipfrac`, `actor/pg_clipfrac_lower` (dual clip), `actor/ppo_kl` (k1 from old to policy).

    Raises:
        SettingsError: clip_low outside [0, 1), clip_high below 0, or dual_clip not above 1.
    """
    log_ratio, advantages = tokens.log_ratio(), tokens.advantages
    clipped, was_clipped = clipped_surrogate(log_ratio.exp(), advantages, clip_low=clip_low, clip_high=clip_high)
    ceiling = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
    return TokenLosses(
        losses=torch.minimum(clipped, ceiling),
        diagnostics={
            "actor/pg_clipfrac": was_clipped,
            "actor/pg_clipfrac_lower": (clipped > ceiling).to(clipped.dtype),
            "actor/ppo_kl": -log_ratio.detach(),
        },
    )


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's loss [T] for ratios [T], and [T] 1 where the clip removed the gradient, else 0."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)
