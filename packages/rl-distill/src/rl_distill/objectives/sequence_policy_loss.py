"""Policy losses on the ratio of the whole response: GSPO and GMPO.

Both use the geometric mean of the tokens' ratios, which does not grow with length. Their papers weight all trajectories
equally: aggregate with seq-mean-token-mean.

Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, section 4.3 (its token form); GMPO, Zhao et al. 2025,
arXiv:2507.20673.
"""

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from rl_core.record_fields import converts_arguments
from rl_distill.objectives.policy_loss import ClipHigh, ClipLow, PolicyTokens, TokenLosses, clipped_surrogate
from rl_distill.objectives.ragged import row_means, spread_rows

LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Upper bound of GSPO's log ratios before exp; beyond it the gradient is 0."""


LogRatioBound = Annotated[float, Ge(0)]
"""Maximum distance of a log ratio from 0."""


@converts_arguments
def gspo(tokens: PolicyTokens, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> TokenLosses:
    """Group sequence policy optimization: PPO's clip on the response's ratio.

    A token's gradient is that of its own logprob times the response's ratio, so advantages may differ between tokens.

    Args:
        tokens: Packed tokens.
        clip_low: Ratios below 1 - clip_low get no gradient where the advantage is negative.
        clip_high: Ratios above 1 + clip_high get no gradient where the advantage is positive.

    Returns:
        Losses and `actor/pg_clipfrac`, `actor/ppo_kl` (k1 from old to policy).

    Raises:
        SettingsError: clip_low outside [0, 1), or clip_high below 0.
    """
    log_ratio = tokens.policy_logprobs - tokens.old_logprobs
    of_sequence = _sequence_means(log_ratio.detach(), tokens)
    own_gradient = tokens.policy_logprobs - tokens.policy_logprobs.detach()
    ratio = (own_gradient + of_sequence).clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    losses, was_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return TokenLosses(
        losses=losses, diagnostics={"actor/pg_clipfrac": was_clipped, "actor/ppo_kl": -log_ratio.detach()}
    )


@converts_arguments
def geo_mean(tokens: PolicyTokens, *, clip_low: LogRatioBound = 0.4, clip_high: LogRatioBound = 0.4) -> TokenLosses:
    """Geometric-mean policy optimization: clips token log ratios, then averages them.

    Args:
        tokens: Packed tokens; a response's advantage is the mean of its tokens' advantages.
        clip_low: A token's log ratio stays above -clip_low where its advantage is negative.
        clip_high: A token's log ratio stays below clip_high where its advantage is positive.

    Returns:
        Losses, the same for all tokens of a response, and `actor/pg_clipfrac` (clipped at positive advantages),
        `actor/pg_clipfrac_lower` (at negative ones), `actor/ppo_kl`.

    Raises:
        SettingsError: A bound is below 0.
    """
    log_ratio, advantages = tokens.log_ratio(), tokens.advantages
    held = log_ratio.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    # Pessimistic like PPO's clip: take the one of the two with the smaller gain.
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * held)
    ratio = _sequence_means(pessimistic, tokens).exp()
    was_clipped = log_ratio.detach() != held.detach()
    return TokenLosses(
        losses=-_sequence_means(advantages, tokens) * ratio,
        diagnostics={
            "actor/pg_clipfrac": (was_clipped & (advantages > 0)).to(ratio.dtype),
            "actor/pg_clipfrac_lower": (was_clipped & (advantages < 0)).to(ratio.dtype),
            "actor/ppo_kl": -log_ratio.detach(),
        },
    )


def _sequence_means(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Return [T] mean over the trained tokens of each token's response."""
    means = row_means(values, tokens.loss_mask, tokens.offsets)
    return spread_rows(means, tokens.offsets, num_tokens=tokens.num_tokens)
