"""Register policy losses and advantages of rl-distill in verl 0.9, under names such as `rl_distill/gspo`.

Each verl process imports this file if VERL_USE_EXTERNAL_MODULES names it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from rl_distill.objectives import (
    PolicyTokens,
    dr_grpo_advantages,
    grpo_advantages,
    policy_loss_with_options,
)

PREFIX = "rl_distill/"
LOSSES = ("ppo_clip", "gspo", "sapo", "gpg", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
"""Losses that need no token selection over the global batch."""
ADVANTAGES = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages}
VerlLoss = Callable[..., tuple[torch.Tensor, dict[str, float]]]


def verl_loss(name: str, **options: Any) -> VerlLoss:
    """Wrap one of our policy losses with verl's signature; verl aggregates it over its global batch."""
    bound = policy_loss_with_options(name, options)

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        mask = response_mask.bool()
        tokens = PolicyTokens.from_padded(log_prob, mask, advantages=advantages, old_logprobs=old_log_prob)
        computed = bound.loss(tokens)
        losses = computed.losses.view_as(log_prob)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        metrics = {key: float(values[tokens.loss_mask].mean()) for key, values in computed.diagnostics.items()}
        total = agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        return total, metrics

    return loss


def verl_advantage(estimate: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Wrap one of our group advantages with verl's signature."""

    def advantage(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **_unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = np.unique(index, return_inverse=True)[1]
        found = estimate(token_level_rewards.sum(-1), torch.from_numpy(group).to(response_mask.device))
        spread = found.unsqueeze(-1) * response_mask
        return spread, spread

    return advantage


for _name in LOSSES:
    register_policy_loss(PREFIX + _name)(verl_loss(_name))
for _name, _estimate in ADVANTAGES.items():
    register_adv_est(PREFIX + _name)(verl_advantage(_estimate))
