"""Translation of TRL's metric names, whose meaning depends on the trainer.

GRPO's `rewards/{function}/mean` is a part of the reward; DPO's `rewards/chosen` is a log ratio of policy and reference.
GRPO's `loss` is that of a policy gradient; SFT's is a cross entropy. Without a policy gradient, the healthy ranges of
our metrics do not apply, so only the learning rate gets our name.

Sources: the logged metrics in TRL's documentation of GRPOTrainer, PPOTrainer and DPOTrainer; `train` in
trl/experimental/ppo/ppo_trainer.py and trl/trainer/rloo_trainer.py; in 1.16, every file that writes `_metrics`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_metrics.importers.run_writer import Names

OF_ROLLOUTS: Names = {
    "grad_norm": ("actor/grad_norm",),
    "learning_rate": ("actor/lr",),
    "entropy": ("actor/entropy",),
    "completions/mean_length": ("response_length/mean",),
    "completions/max_length": ("response_length/max",),
    "completions/min_length": ("response_length/min",),
    "completions/clipped_ratio": ("response_length/clip_ratio",),
    "completion_length": ("response_length/mean",),  # until 0.16
    "sampling/sampling_logp_difference/mean": ("training/rollout_logprobs_diff_mean",),
    "sampling/sampling_logp_difference/max": ("training/rollout_logprobs_diff_max",),
    "sampling/importance_sampling_ratio/mean": ("rollout_corr/rollout_is_mean",),
    "sampling/importance_sampling_ratio/max": ("rollout_corr/rollout_is_max",),
    "sampling/importance_sampling_ratio/min": ("rollout_corr/rollout_is_min",),
    "sample/staleness_mean": ("training/staleness/mean",),
    "sample/staleness_max": ("training/staleness/max",),
    "step_time": ("timing_s/step", "perf/time_per_step"),
    "perf/step_s": ("timing_s/step", "perf/time_per_step"),
}
"""Names of all trainers that train on the policy's samples; `sample/*` and `perf/step_s` of asynchronous ones."""

POLICY_GRADIENT: Names = {
    **OF_ROLLOUTS,
    "loss": ("actor/loss",),
    "policy_loss": ("actor/pg_loss",),  # if the loss has an entropy bonus
    "kl": ("actor/kl_loss",),
    "clip_ratio/region_mean": ("actor/pg_clipfrac",),
    "clip_ratio": ("actor/pg_clipfrac",),  # until 0.16
    "cispo_clip_ratio": ("actor/pg_clipfrac",),
    "reward": ("critic/score/mean", "critic/rewards/mean"),  # its reward has no penalties
    "reward_std": ("rollout/group_reward_std",),
    "rewards/{component}/mean": ("reward/{component}/mean",),
    "rewards/{component}": ("reward/{component}/mean",),  # until 0.15
    "frac_reward_zero_std": ("rollout/groups_without_spread_ratio",),
    "eval_reward": ("val-core/eval/reward/mean@1",),
    "eval_rewards/{component}/mean": ("val-aux/eval/{component}/mean@1",),
}
"""Names of GRPO and RLOO. The mean of n responses has the same expectation for each n, so an unknown n is 1."""

ASYNC: Names = {**POLICY_GRADIENT, "kl": ("rollout_corr/k3_kl",)}
"""Names of AsyncGRPO, whose KL is from the engine's policy to the trained one."""

DISTILLATION: Names = {
    **OF_ROLLOUTS,
    "jsd": ("actor/distillation/loss",),
    "self_distillation/distillation_loss": ("actor/distillation/loss",),
    "loss": ("actor/distillation/loss",),
}
"""Names of on-policy distillation, whose loss is a divergence."""

PPO: Names = {
    "objective/scores": ("critic/score/mean",),
    "objective/rlhf_reward": ("critic/rewards/mean",),  # with the penalty for the KL
    "loss/policy_avg": ("actor/pg_loss",),
    "policy/clipfrac_avg": ("actor/pg_clipfrac",),
    "loss/value_avg": ("critic/vf_loss",),
    "val/clipfrac_avg": ("critic/vf_clipfrac",),
    "lr": ("actor/lr",),
}
"""Names of PPO.

Without a counterpart here: `objective/kl` and `objective/entropy` are sums over a response, `policy/approxkl_avg` is
half a mean square (k2), and `policy/entropy_avg` counts padding.
"""

OLD_RLOO: Names = {theirs: PPO[theirs] for theirs in ("objective/scores", "objective/rlhf_reward", "lr")}
"""Names of RLOO until 0.21: those of PPO, but its ratios are per response, not per token, and it has no critic."""

OTHERS: Names = {"learning_rate": ("actor/lr",)}
"""Names of DPO and similar trainers, SFT and GKD."""

PART_OF_REWARD = re.compile(r"rewards/.+/mean")


def names_of(history: Sequence[Mapping[str, Any]]) -> Names:
    """Return the names of the trainer that wrote a history, recognized by the names in it."""
    names = {name.removeprefix("eval_") for row in history for name in row}
    if "reward" in names or any(map(PART_OF_REWARD.fullmatch, names)):
        return ASYNC if "sample/staleness_mean" in names else POLICY_GRADIENT
    if names & {"completions/mean_length", "jsd"}:
        return DISTILLATION
    if "rewards/chosen" in names:  # also online DPO, which has objective/rlhf_reward too
        return OTHERS
    if not names & {"objective/rlhf_reward", "policy/approxkl_avg"}:
        return OTHERS
    has_critic = any(row.get("loss/value_avg") for row in history)  # RLOO writes 0.0
    return PPO if has_critic else OLD_RLOO
