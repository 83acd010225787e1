"""Objectives as pure functions on tensors; need only torch.

This module exports the functions for your own programs. `registry` lists the functions that settings can name; each
family of functions has its own file.
"""

from rl_distill.objectives.advantages import dr_grpo_advantages, grpo_advantages
from rl_distill.objectives.aggregation import AGGREGATIONS, aggregate
from rl_distill.objectives.batch_columns import (
    SampledLogprobs,
    component_columns,
    correction_weight_metrics,
    mean_reference_kl,
    with_advantages,
    with_correction_weights,
    with_kl_in_reward,
    with_loss_weights,
    with_rejection,
    with_reward_components,
    with_token_selection,
    without_truncated,
)
from rl_distill.objectives.chunked_head import chunked_head_divergence
from rl_distill.objectives.covariance_policy_loss import TokenSelection, selection_of, selects_with
from rl_distill.objectives.distillation import (
    DistillationObjective,
    DistillationObjectiveOptions,
    with_distillation_advantages,
)
from rl_distill.objectives.divergences import DivergenceOptions
from rl_distill.objectives.kl import KL_ESTIMATORS, AdaptiveKL
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.policy import (
    PolicyObjective,
    PolicyObjectiveOptions,
    bound_policy_loss,
    compute_policy_loss,
    policy_objective,
    supervised_objective,
)
from rl_distill.objectives.policy_loss import PolicyTokens, TokenLosses
from rl_distill.objectives.ragged import spread_rows
from rl_distill.objectives.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    declared_options,
    policy_loss_with_options,
    try_advantage,
)
from rl_distill.objectives.rejection import REJECTION_CRITERIA, rejection_limits
from rl_distill.objectives.rewarded_rows import SESSION_RULES, RewardedRows, SessionCredit, SessionRows
from rl_distill.objectives.teacher_tokens import TeacherTokens
from rl_distill.objectives.tinker import TINKER_LOSSES, tinker_objective
from rl_distill.objectives.value import ValueObjective
from rl_distill.objectives.vocabulary import VocabularyPart

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "REJECTION_CRITERIA",
    "SESSION_RULES",
    "TINKER_LOSSES",
    "AdaptiveKL",
    "DistillationObjective",
    "DistillationObjectiveOptions",
    "DivergenceOptions",
    "LogitDivergence",
    "PolicyObjective",
    "PolicyObjectiveOptions",
    "PolicyTokens",
    "RewardedRows",
    "SampledLogprobs",
    "SessionCredit",
    "SessionRows",
    "TeacherTokens",
    "TokenLosses",
    "TokenSelection",
    "ValueObjective",
    "VocabularyPart",
    "aggregate",
    "bound_policy_loss",
    "chunked_head_divergence",
    "component_columns",
    "compute_policy_loss",
    "correction_weight_metrics",
    "declared_options",
    "dr_grpo_advantages",
    "grpo_advantages",
    "mean_reference_kl",
    "policy_loss_with_options",
    "policy_objective",
    "rejection_limits",
    "selection_of",
    "selects_with",
    "spread_rows",
    "supervised_objective",
    "tinker_objective",
    "try_advantage",
    "with_advantages",
    "with_correction_weights",
    "with_distillation_advantages",
    "with_kl_in_reward",
    "with_loss_weights",
    "with_rejection",
    "with_reward_components",
    "with_token_selection",
    "without_truncated",
]
