"""Policy losses whose gradient is that of the logprob, times a weight without gradient.

Only the gradient is meaningful; the value is not a surrogate of the reward.

Source: GPG, Chu et al. 2025, arXiv:2504.02546; CISPO, MiniMax 2025, arXiv:2506.13585, section 3.1; DPPO, 2026,
arXiv:2602.04879.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from rl_core.record_fields import converts_arguments
from rl_distill.objectives.policy_loss import ClipHigh, PolicyTokens, TokenLosses

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
