"""Differences between the engine's and the learner's logprobs.

Source: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; metric names follow verl.
"""

import torch
from torch import Tensor

from rl_distill.objectives.correction import blank_masked
from rl_distill.objectives.log_ratios import bounded, excess
from rl_distill.objectives.ragged import row_counts, row_sums


def mismatch_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, offsets: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure how the engine's logprobs differ from the learner's, as sums over tokens and trajectories.

    Args:
        old_logprobs: [T] the learner's logprobs.
        rollout_logprobs: [T] the engine's logprobs.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.

    Returns:
        (weighted sum, weight) by metric name. Over tokens: `training/rollout_probs_diff_mean`, `rollout_corr/kl` (of
        the engine to the learner), `k3_kl`, `chi2_token`. Over trajectories with a trained token, from their mean
        logprobs: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `log_ppl_diff`,
        `log_ppl_abs_diff`, `ppl_ratio`, and `chi2_seq`.

    Raises:
        ShapeError: The shapes or dtypes do not match.
    """
    old = blank_masked(old_logprobs.detach(), loss_mask, offsets)
    rollout = blank_masked(rollout_logprobs.detach(), loss_mask, offsets)
    counts = row_counts(loss_mask, offsets)
    of_tokens, of_rows = _token_metrics(old, rollout), _row_metrics(old, rollout, counts, offsets)
    sums = {name: _masked_sum(values, loss_mask) for name, values in of_tokens.items()}
    return sums | {name: _masked_sum(values, counts > 0) for name, values in of_rows.items()}


def _token_metrics(old: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Return [T] values by name from logprobs [T]."""
    log_ratio = bounded(old - rollout)
    return {
        "training/rollout_probs_diff_mean": (old.exp() - rollout.exp()).abs(),
        "rollout_corr/kl": rollout - old,
        "rollout_corr/k3_kl": excess(log_ratio),
        "rollout_corr/chi2_token": torch.expm1(2.0 * log_ratio),
    }


def _row_metrics(old: Tensor, rollout: Tensor, counts: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """Return [N] values by name from logprobs [T], 0 where masked, and the rows' trained tokens [N]."""
    training_log_ppl = -row_sums(old, offsets) / counts.clamp(min=1)
    rollout_log_ppl = -row_sums(rollout, offsets) / counts.clamp(min=1)
    difference = training_log_ppl - rollout_log_ppl
    return {
        "rollout_corr/training_ppl": training_log_ppl.exp(),
        "rollout_corr/training_log_ppl": training_log_ppl,
        "rollout_corr/rollout_ppl": rollout_log_ppl.exp(),
        "rollout_corr/rollout_log_ppl": rollout_log_ppl,
        "rollout_corr/log_ppl_diff": difference,
        "rollout_corr/log_ppl_abs_diff": difference.abs(),
        "rollout_corr/ppl_ratio": difference.exp(),
        "rollout_corr/chi2_seq": torch.expm1(2.0 * bounded(row_sums(old - rollout, offsets))),
    }


def _masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of values where the mask is True, and their number, as scalars."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum().to(values.dtype)
