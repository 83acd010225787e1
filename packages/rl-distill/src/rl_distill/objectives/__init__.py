"""Objectives as pure functions on tensors; importable with torch alone."""

from rl_distill.objectives.advantages import (
    AdvantageEstimator,
    RewardedRows,
    dr_grpo,
    dr_grpo_advantages,
    grpo,
    grpo_advantages,
    session_advantages,
)
from rl_distill.objectives.aggregation import AGGREGATIONS, token_weights
from rl_distill.objectives.batch_columns import with_advantages, with_correction_weights, with_loss_weights
from rl_distill.objectives.correction import mismatch_metrics, mismatch_sums, truncated_weights
from rl_distill.objectives.kl import KL_ESTIMATORS, KLEstimator
from rl_distill.objectives.logits import entropy_from_logits, logprobs_from_logits
from rl_distill.objectives.policy_loss import PolicyLoss, PolicyTokens, TokenLosses, ppo_clip
from rl_distill.objectives.policy_objective import PolicyObjective, PolicyObjectiveOptions, policy_objective
from rl_distill.objectives.registry import ADVANTAGES, AGGREGATION, KL, POLICY_LOSSES, function_with_options

__all__ = [
    "ADVANTAGES",
    "AGGREGATION",
    "AGGREGATIONS",
    "KL",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "KLEstimator",
    "PolicyLoss",
    "PolicyObjective",
    "PolicyObjectiveOptions",
    "PolicyTokens",
    "RewardedRows",
    "TokenLosses",
    "dr_grpo",
    "dr_grpo_advantages",
    "entropy_from_logits",
    "function_with_options",
    "grpo",
    "grpo_advantages",
    "logprobs_from_logits",
    "mismatch_metrics",
    "mismatch_sums",
    "policy_objective",
    "ppo_clip",
    "session_advantages",
    "token_weights",
    "truncated_weights",
    "with_advantages",
    "with_correction_weights",
    "with_loss_weights",
]
