"""Correction for the engine's mismatch: it samples with probabilities slightly other than the learner's.

Source: truncated importance sampling, Ionides 2008, doi:10.1198/106186008X320456; for an engine's mismatch, Yao et
al. 2025, https://fengyao.notion.site/off-policy-rl.
"""

from typing import Literal

import torch
from torch import Tensor

from rl_core.errors import SettingsError
from rl_distill.objectives.ragged import row_counts, row_sums, spread_rows
from rl_distill.objectives.shapes import check_mask, check_offsets, check_tokens

CorrectionLevel = Literal["token", "sequence"]
"""What one importance ratio covers: a token (biased, low variance), or a whole trajectory (unbiased, high)."""

LOG_RATIO_BOUND = 20.0
"""Log ratios, summed ones too, are clamped to this before exp, which would overflow."""


def truncated_weights(
    log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, level: CorrectionLevel, cap: float = 2.0
) -> Tensor:
    """Importance weights old / rollout, truncated from above.

    Args:
        log_ratio: [T] old_logprobs - rollout_logprobs; anything where masked.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 rows.
        level: "token", or "sequence" for the product over each trajectory's trained tokens.
        cap: Largest weight.

    Returns:
        [T] weights without gradient, 0 where masked.

    Raises:
        ShapeError: Shapes or dtypes other than above.
        SettingsError: Unknown level, or cap not positive.
    """
    if level not in ("token", "sequence") or cap <= 0:
        raise SettingsError(f'correction needs level "token" or "sequence" and cap > 0; found {level!r}, {cap}.')
    log_ratio = _blank(log_ratio, loss_mask, offsets)
    if level == "sequence":
        log_ratio = spread_rows(row_sums(log_ratio, offsets), offsets, num_tokens=len(log_ratio))
    weights = _bounded(log_ratio).exp().clamp(max=cap)
    return torch.where(loss_mask, weights, torch.zeros_like(weights))


def mismatch_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, offsets: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """How far the engine's logprobs are from the learner's, as sums that add up over micro-batches and ranks.

    Args:
        old_logprobs: [T] the learner's.
        rollout_logprobs: [T] the engine's.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 rows.

    Returns:
        (weighted sum, weight) by metric name. Over tokens: `training/rollout_probs_diff_mean`, `rollout_corr/kl` (of
        the engine to the learner), `k3_kl`, `chi2_token`. Over trajectories with a trained token, from their mean
        logprobs: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `log_ppl_diff`,
        `log_ppl_abs_diff`, `ppl_ratio`, and `chi2_seq`.

    Raises:
        ShapeError: Shapes or dtypes other than above.
    """
    old = _blank(old_logprobs.detach(), loss_mask, offsets)
    rollout = _blank(rollout_logprobs.detach(), loss_mask, offsets)
    log_ratio = _bounded(old - rollout)
    of_tokens = {
        "training/rollout_probs_diff_mean": (old.exp() - rollout.exp()).abs(),
        "rollout_corr/kl": rollout - old,
        "rollout_corr/k3_kl": torch.expm1(log_ratio) - log_ratio,
        "rollout_corr/chi2_token": torch.expm1(2.0 * log_ratio),
    }
    counts = row_counts(loss_mask, offsets)
    training_log_ppl = -row_sums(old, offsets) / counts.clamp(min=1)
    rollout_log_ppl = -row_sums(rollout, offsets) / counts.clamp(min=1)
    difference = training_log_ppl - rollout_log_ppl
    of_rows = {
        "rollout_corr/training_ppl": training_log_ppl.exp(),
        "rollout_corr/training_log_ppl": training_log_ppl,
        "rollout_corr/rollout_ppl": rollout_log_ppl.exp(),
        "rollout_corr/rollout_log_ppl": rollout_log_ppl,
        "rollout_corr/log_ppl_diff": difference,
        "rollout_corr/log_ppl_abs_diff": difference.abs(),
        "rollout_corr/ppl_ratio": difference.exp(),
        "rollout_corr/chi2_seq": torch.expm1(2.0 * _bounded(row_sums(old - rollout, offsets))),
    }
    sums = {name: _masked_sum(values, loss_mask) for name, values in of_tokens.items()}
    return sums | {name: _masked_sum(values, counts > 0) for name, values in of_rows.items()}


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, offsets: Tensor
) -> dict[str, Tensor]:
    """The means of `mismatch_sums` over a whole batch, with the extremes, which do not add up over parts of it.

    Returns:
        Scalars by name: those of `mismatch_sums`, and `rollout_corr/log_ppl_diff_max` and `_min` over trajectories.
        NaN when nothing trains.
    """
    sums = mismatch_sums(old_logprobs, rollout_logprobs, loss_mask, offsets)
    metrics = {name: total / weight for name, (total, weight) in sums.items()}
    log_ratio = _blank(old_logprobs - rollout_logprobs, loss_mask, offsets)
    counts = row_counts(loss_mask, offsets)
    differences = -(row_sums(log_ratio, offsets) / counts.clamp(min=1))[counts > 0]
    is_empty = len(differences) == 0
    metrics["rollout_corr/log_ppl_diff_max"] = differences.new_tensor(torch.nan) if is_empty else differences.max()
    metrics["rollout_corr/log_ppl_diff_min"] = differences.new_tensor(torch.nan) if is_empty else differences.min()
    return metrics


def _blank(values: Tensor, loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """Checked values, 0 where masked."""
    num_tokens = check_tokens({"logprobs": values, "loss_mask": loss_mask})
    check_mask(loss_mask)
    check_offsets(offsets, num_tokens=num_tokens)
    return torch.where(loss_mask, values, torch.zeros_like(values)).detach()


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum().to(values.dtype)
