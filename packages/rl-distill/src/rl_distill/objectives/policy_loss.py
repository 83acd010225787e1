"""What a policy loss is on packed tokens, and PPO's clip.

The other families are in `sequence_policy_loss`, `weighted_policy_loss`, `soft_policy_loss` and
`covariance_policy_loss`.

Source: PPO's clip, Schulman et al. 2017, arXiv:1707.06347; separate clip_high, DAPO, Yu et al. 2025,
arXiv:2503.14476; dual clip, Ye et al. 2020, arXiv:1912.09729.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated

import torch
from torch import Tensor

from rl_core.record_fields import converts_arguments, record
from rl_distill.objectives.log_ratios import bounded
from rl_distill.objectives.option_rules import checked, number
from rl_distill.objectives.ragged import padded_offsets
from rl_distill.objectives.shapes import (
    as_mask,
    check_mask,
    check_offsets,
    check_padded,
    check_tokens,
    refuse_probabilities,
)

ClipLow = Annotated[float, number(at_least=0.0, below=1.0)]
"""Ratios are held above 1 - clip_low, which must be above 0."""

ClipHigh = Annotated[float, number(at_least=0.0, can_be_inf=True)]
"""Ratios are held below 1 + clip_high."""


@record
class PolicyTokens:
    """What a policy loss is made from: whole trajectories packed end to end.

    Outside loss_mask the three float tensors read 0, whatever was given: neither a value nor a gradient passes. Only
    policy_logprobs keep their gradient.

    Attributes:
        policy_logprobs: [T] float.
        old_logprobs: [T] float, of the policy before this batch's updates.
        advantages: [T] float.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 rows.
        selection: [T] bool, tokens that the loss treats apart; None where the batch has none. Which ones is decided
            over the global batch (`covariance_policy_loss`), so that micro-batches do not change it.
    """

    policy_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    offsets: Tensor
    selection: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, and blank what is masked."""
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
        """The same from padded rows [B, T], on either side.

        Args:
            policy_logprobs: [B, T] float, with gradient.
            loss_mask: [B, T] bool, or integers that are 0 where a token does not train.
            advantages: [B, T], or [B] for all tokens of a row.
            old_logprobs: [B, T]; None takes policy_logprobs without gradient: the first update on a batch.
            selection: [B, T] bool.

        Raises:
            ShapeError: A tensor is not [B, T], or the mask is of floats.
            DataError: On a CPU: a logprob of a token that trains is above 0.
        """
        loss_mask = as_mask(loss_mask)
        padded = {
            "policy_logprobs": policy_logprobs,
            "loss_mask": loss_mask,
            "advantages": advantages.unsqueeze(-1).expand(-1, loss_mask.shape[-1])
            if advantages.ndim == 1
            else advantages,
            "old_logprobs": policy_logprobs.detach() if old_logprobs is None else old_logprobs,
        } | ({} if selection is None else {"selection": selection})
        check_padded(padded)
        for name in ("policy_logprobs", "old_logprobs"):
            refuse_probabilities(padded[name], loss_mask, name)
        return cls(**{name: tensor.reshape(-1) for name, tensor in padded.items()}, offsets=padded_offsets(loss_mask))

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.loss_mask)

    def log_ratio(self) -> Tensor:
        """[T] log(policy / old), within `LOG_RATIO_BOUND`."""
        return bounded(self.policy_logprobs - self.old_logprobs)


@record
class TokenLosses:
    """What a policy loss gives.

    Attributes:
        losses: [T], to be summed with the tokens' weights; values outside loss_mask do not count.
        diagnostics: [T] values by metric name, without gradient, to be averaged over trained tokens.
    """

    losses: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[..., TokenLosses]
"""(PolicyTokens, **options) -> TokenLosses. A token's loss depends on no other trajectory, so that losses add up over
micro-batches; it may depend on the tokens of its own."""


@checked
def ppo_clip(
    tokens: PolicyTokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: Annotated[float, number(above=1.0, can_be_inf=True)] = 3.0,
) -> TokenLosses:
    """PPO's clipped surrogate with dual clip.

    Args:
        tokens: Packed tokens.
        clip_low: The ratio's gain ends at 1 - clip_low where the advantage is negative.
        clip_high: The ratio's gain ends at 1 + clip_high where the advantage is positive.
        dual_clip: Where the advantage is negative the loss is at most dual_clip * |advantage|; math.inf turns it off.

    Returns:
        Losses and `actor/pg_clipfrac`, `actor/pg_clipfrac_lower` (dual clip), `actor/ppo_kl` (k1 of old to policy).

    Raises:
        SettingsError: clip_low outside [0, 1), clip_high below 0, or dual_clip not above 1.
    """
    log_ratio, advantages = tokens.log_ratio(), tokens.advantages
    clipped, was_clipped = clipped_surrogate(log_ratio.exp(), advantages, clip_low=clip_low, clip_high=clip_high)
    is_negative = advantages < 0
    ceiling = torch.where(is_negative, -advantages, torch.ones_like(advantages)) * dual_clip
    losses = torch.where(is_negative, torch.minimum(clipped, ceiling), clipped)
    return TokenLosses(
        losses=losses,
        diagnostics={
            "actor/pg_clipfrac": was_clipped,
            "actor/pg_clipfrac_lower": (is_negative & (clipped > ceiling)).to(losses.dtype),
            "actor/ppo_kl": -log_ratio.detach(),
        },
    )


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's loss of ratios [T], and [T] 1 where the clip took its gradient away, else 0."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)
