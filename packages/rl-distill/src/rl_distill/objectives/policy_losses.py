"""Policy losses on the ratio of the whole response (GSPO, GMPO), with a soft clip (SAPO), and with weighted logprobs.

GSPO and GMPO use the geometric mean of the tokens' ratios, which does not grow with length. Their papers, and SAPO's,
weight all trajectories equally: aggregate with seq-mean-token-mean. GPG, CISPO and DPPO have the gradient of the
logprob, times a weight without gradient; their value is not a surrogate of the reward. DRO replaces the ratio by a
penalty.

Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, section 4.3 (its token form); GMPO, Zhao et al. 2025,
arXiv:2507.20673; SAPO, Gao et al. 2025, arXiv:2511.20347, equations 3 to 6; GPG, Chu et al. 2025, arXiv:2504.02546;
CISPO, MiniMax 2025, arXiv:2506.13585, section 3.1; DPPO, 2026, arXiv:2602.04879; DRO, Richemond et al. 2024,
arXiv:2405.19107, in the token form of Kimi k1.5, arXiv:2501.12599.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from rl_core.record_fields import NonNegativeFloat, PositiveFloat, converts_arguments
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
        tokens: Packed tokens. The ratio is that of `selection`, or of all trained tokens without a selection.
        clip_low: Ratios below 1 - clip_low get no gradient where the advantage is negative.
        clip_high: Ratios above 1 + clip_high get no gradient where the advantage is positive.

    Returns:
        Losses and `actor/pg_clipfrac`, `actor/ppo_kl` (k1 from old to policy).

    Raises:
        SettingsError: clip_low outside [0, 1), or clip_high below 0.
    """
    log_ratio = tokens.policy_logprobs - tokens.old_logprobs
    of_ratio = tokens.loss_mask if tokens.selection is None else tokens.selection
    of_sequence = _sequence_means(log_ratio.detach(), tokens, of_ratio)
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
    ratio = _sequence_means(pessimistic, tokens, tokens.loss_mask).exp()
    was_clipped = log_ratio.detach() != held.detach()
    return TokenLosses(
        losses=-_sequence_means(advantages, tokens, tokens.loss_mask) * ratio,
        diagnostics={
            "actor/pg_clipfrac": (was_clipped & (advantages > 0)).to(ratio.dtype),
            "actor/pg_clipfrac_lower": (was_clipped & (advantages < 0)).to(ratio.dtype),
            "actor/ppo_kl": -log_ratio.detach(),
        },
    )


def _sequence_means(values: Tensor, tokens: PolicyTokens, mask: Tensor) -> Tensor:
    """Return [T] mean over the tokens in the mask of each token's response."""
    means = row_means(values, mask, tokens.offsets)
    return spread_rows(means, tokens.offsets, num_tokens=tokens.num_tokens)


Steepness = PositiveFloat
"""Steepness of a sigmoid; a higher value fades earlier."""


@converts_arguments
def sapo(tokens: PolicyTokens, *, tau_positive: Steepness = 1.0, tau_negative: Steepness = 1.05) -> TokenLosses:
    """Soft adaptive policy optimization: a sigmoid of the ratio instead of the clip.

    The paper weights all trajectories equally: aggregate with seq-mean-token-mean.

    Args:
        tokens: Packed tokens.
        tau_positive: Steepness at positive advantages; a higher value fades earlier.
        tau_negative: Steepness at all other advantages.

    Returns:
        Losses -advantage * 4 / tau * sigmoid(tau * (ratio - 1)), whose gradient at ratio 1 is that of -advantage *
        ratio, and `actor/ppo_kl`.

    Raises:
        SettingsError: A steepness is not above 0.
    """
    log_ratio = tokens.log_ratio()
    steepness = torch.where(tokens.advantages > 0, tau_positive, tau_negative).to(log_ratio.dtype)
    gate = torch.sigmoid(steepness * (log_ratio.exp() - 1.0)) * (4.0 / steepness)
    return TokenLosses(losses=-tokens.advantages * gate, diagnostics={"actor/ppo_kl": -log_ratio.detach()})


RatioCap = Annotated[float, Ge(1)]
"""Maximum importance weight."""

ProbabilityChange = Annotated[float, Ge(0), Le(1)]
"""Difference of two probabilities."""

Nats = Annotated[float, Ge(0)]
"""A KL divergence in nats."""

COMPLEMENT_FLOOR = 1e-8
"""Lower bound of 1 - probability before its logarithm."""


def gpg(tokens: PolicyTokens) -> TokenLosses:
    """Group policy gradient: REINFORCE without ratio or clip."""
    log_ratio = tokens.log_ratio().detach()
    return TokenLosses(losses=-tokens.advantages * tokens.policy_logprobs, diagnostics={"actor/ppo_kl": -log_ratio})


@converts_arguments
def cispo(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 0.2,
    clip_high: ClipHigh = 0.28,
) -> TokenLosses:
    """Clipped importance sampling: clips the weight, so that every token keeps its gradient.

    Args:
        tokens: Packed tokens.
        clip_low: Weights are at least 1 - clip_low; 1 disables this bound, as in the paper.
        clip_high: Weights are at most 1 + clip_high.

    Returns:
        Losses and `actor/pg_clipfrac`, `actor/ppo_kl`.

    Raises:
        SettingsError: clip_low outside [0, 1], or clip_high below 0.
    """
    log_ratio = tokens.log_ratio().detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(
        losses=-tokens.advantages * weight * tokens.policy_logprobs,
        diagnostics={"actor/pg_clipfrac": (ratio != weight).to(ratio.dtype), "actor/ppo_kl": -log_ratio},
    )


@converts_arguments
def dro(tokens: PolicyTokens, *, beta: NonNegativeFloat = 0.05) -> TokenLosses:
    """Direct reward optimization: plain policy gradient with a quadratic penalty, also for old or foreign samples.

    Args:
        tokens: Packed tokens, with advantages over a soft value (the paper's), not over the mean reward.
        beta: Weight of half the squared log ratio.

    Returns:
        Losses and `actor/ppo_kl`.

    Raises:
        SettingsError: beta is below 0.
    """
    log_ratio = tokens.policy_logprobs - tokens.old_logprobs
    losses = 0.5 * beta * log_ratio.square() - tokens.advantages * tokens.policy_logprobs
    return TokenLosses(losses=losses, diagnostics={"actor/ppo_kl": -log_ratio.detach()})


@converts_arguments
def dppo_tv(
    tokens: PolicyTokens,
    *,
    clip_low: ProbabilityChange = 0.2,
    clip_high: ProbabilityChange = 0.2,
    ratio_cap: RatioCap = 20.0,
) -> TokenLosses:
    """Divergence PPO by total variation: a token is trained while its probability is close to the old one.

    Args:
        tokens: Packed tokens.
        clip_low: At negative advantages, a token is no longer trained once its probability fell by more than this.
        clip_high: At positive advantages, a token is no longer trained once its probability rose by more than this.
        ratio_cap: Maximum importance weight.

    Returns:
        Losses and `actor/pg_clipfrac` (tokens not trained), `actor/pg_clipfrac_lower` (capped weights), `actor/ppo_kl`.

    Raises:
        SettingsError: A bound is outside [0, 1], or ratio_cap below 1.
    """
    change = tokens.policy_logprobs.detach().exp() - tokens.old_logprobs.exp()
    is_near = torch.where(tokens.advantages > 0, change <= clip_high, change >= -clip_low)
    return _trust_region_losses(tokens, is_near, ratio_cap=ratio_cap)


@converts_arguments
def dppo_kl(
    tokens: PolicyTokens, *, clip_low: Nats = 0.05, clip_high: Nats = 0.05, ratio_cap: RatioCap = 20.0
) -> TokenLosses:
    """Divergence PPO by the KL of a binary outcome: this token, or any other.

    Args:
        tokens: Packed tokens.
        clip_low: At negative advantages, a token whose probability fell is no longer trained beyond this KL, in nats.
        clip_high: At positive advantages, a token whose probability rose is no longer trained beyond this KL, in nats.
        ratio_cap: Maximum importance weight.

    Returns:
        Losses and the metrics of `dppo_tv`.

    Raises:
        SettingsError: A bound is below 0, or ratio_cap below 1.
    """
    policy, old = tokens.policy_logprobs.detach(), tokens.old_logprobs
    kl = old.exp() * (old - policy) + _complement(old) * (_complement(old).log() - _complement(policy).log())
    is_near = torch.where(
        tokens.advantages > 0, (kl <= clip_high) | (policy <= old), (kl <= clip_low) | (policy >= old)
    )
    return _trust_region_losses(tokens, is_near, ratio_cap=ratio_cap)


def _trust_region_losses(tokens: PolicyTokens, is_near: Tensor, *, ratio_cap: float) -> TokenLosses:
    log_ratio = tokens.log_ratio().detach()
    ratio = log_ratio.exp()
    weight = torch.where(is_near, ratio.clamp(max=ratio_cap), torch.zeros_like(ratio))
    return TokenLosses(
        losses=-tokens.advantages * weight * tokens.policy_logprobs,
        diagnostics={
            "actor/pg_clipfrac": (~is_near).to(ratio.dtype),
            "actor/pg_clipfrac_lower": (is_near & (ratio > ratio_cap)).to(ratio.dtype),
            "actor/ppo_kl": -log_ratio,
        },
    )


def _complement(logprobs: Tensor) -> Tensor:
    """Return [T] total probability of all other tokens, bounded away from 0."""
    return (-torch.expm1(logprobs)).clamp(min=COMPLEMENT_FLOOR)
