"""Objectives as pure functions on tensors; importable with torch alone.

Everything that a setting can name is in `registry`; the functions behind the names are in one file a family.
"""

from rl_distill.objectives.advantages import (
    dr_grpo,
    dr_grpo_advantages,
    gpg_advantages,
    grpo,
    grpo_advantages,
    opo_advantages,
    passk_advantages,
    rloo_advantages,
)
from rl_distill.objectives.aggregation import AGGREGATIONS, token_weights
from rl_distill.objectives.baseline_advantages import gae, remax
from rl_distill.objectives.batch_columns import (
    correction_weight_metrics,
    mean_reference_kl,
    with_advantages,
    with_correction_weights,
    with_kl_in_reward,
    with_loss_weights,
    with_rejection,
    with_reward_components,
    with_token_selection,
)
from rl_distill.objectives.chunked_head import chunked_head_divergence
from rl_distill.objectives.correction import banded_weights, truncated_weights
from rl_distill.objectives.covariance_policy_loss import clip_cov, covariances, kl_cov, select_band, select_top
from rl_distill.objectives.distillation import (
    DistillationObjective,
    DistillationObjectiveOptions,
    distillation_objective,
    with_distillation_advantages,
)
from rl_distill.objectives.divergences import DivergenceOptions, divergence_terms, top_k_divergence
from rl_distill.objectives.kl import KL_ESTIMATORS, KLEstimator
from rl_distill.objectives.kl_control import AdaptiveKL
from rl_distill.objectives.logit_divergence import LogitDivergence, TeacherTokens, TokenComparison
from rl_distill.objectives.logits import entropy_from_logits, logprobs_from_logits
from rl_distill.objectives.mismatch import mismatch_metrics, mismatch_sums
from rl_distill.objectives.policy_loss import PolicyLoss, PolicyTokens, TokenLosses, ppo_clip
from rl_distill.objectives.policy_objective import (
    PolicyObjective,
    PolicyObjectiveOptions,
    bound_policy_loss,
    policy_objective,
)
from rl_distill.objectives.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    BoundPolicyLoss,
    function_with_options,
    policy_loss_with_options,
)
from rl_distill.objectives.rejection import REJECTION_CRITERIA, rejection_mask
from rl_distill.objectives.rewarded_rows import AdvantageEstimator, RewardedRows, session_advantages
from rl_distill.objectives.selection import TokenSelection, selects_with
from rl_distill.objectives.sequence_policy_loss import geo_mean, gspo
from rl_distill.objectives.sessions import SESSION_RULES, SessionCredit, SessionRows, SessionRule
from rl_distill.objectives.soft_policy_loss import sapo
from rl_distill.objectives.value_objective import ValueObjective, value_losses, value_objective
from rl_distill.objectives.vocabulary_parts import VocabularyPart
from rl_distill.objectives.weight_metrics import WeightBounds, weight_metrics
from rl_distill.objectives.weighted_policy_loss import cispo, dppo_kl, dppo_tv
from rl_distill.objectives.whitened_advantages import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline
from rl_distill.objectives.whitening import masked_whiten

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "REJECTION_CRITERIA",
    "SESSION_RULES",
    "AdaptiveKL",
    "AdvantageEstimator",
    "BoundPolicyLoss",
    "DistillationObjective",
    "DistillationObjectiveOptions",
    "DivergenceOptions",
    "KLEstimator",
    "LogitDivergence",
    "PolicyLoss",
    "PolicyObjective",
    "PolicyObjectiveOptions",
    "PolicyTokens",
    "RewardedRows",
    "SessionCredit",
    "SessionRows",
    "SessionRule",
    "TeacherTokens",
    "TokenComparison",
    "TokenLosses",
    "TokenSelection",
    "ValueObjective",
    "VocabularyPart",
    "WeightBounds",
    "banded_weights",
    "bound_policy_loss",
    "chunked_head_divergence",
    "cispo",
    "clip_cov",
    "correction_weight_metrics",
    "covariances",
    "distillation_objective",
    "divergence_terms",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dr_grpo_advantages",
    "entropy_from_logits",
    "function_with_options",
    "gae",
    "gdpo",
    "geo_mean",
    "gpg_advantages",
    "grpo",
    "grpo_advantages",
    "gspo",
    "kl_cov",
    "logprobs_from_logits",
    "masked_whiten",
    "mean_reference_kl",
    "mismatch_metrics",
    "mismatch_sums",
    "opo_advantages",
    "passk_advantages",
    "policy_loss_with_options",
    "policy_objective",
    "ppo_clip",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rejection_mask",
    "remax",
    "rloo_advantages",
    "sapo",
    "select_band",
    "select_top",
    "selects_with",
    "session_advantages",
    "token_weights",
    "top_k_divergence",
    "truncated_weights",
    "value_losses",
    "value_objective",
    "weight_metrics",
    "with_advantages",
    "with_correction_weights",
    "with_distillation_advantages",
    "with_kl_in_reward",
    "with_loss_weights",
    "with_rejection",
    "with_reward_components",
    "with_token_selection",
]
