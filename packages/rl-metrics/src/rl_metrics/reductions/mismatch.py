"""Differences between the engine's and the learner's logprobs, as pure functions of a batch, in float64."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch

Array = NDArray[Any]

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to +-20 before exp, as verl does, so that a chi-squared divergence stays finite."""


def summarize_mismatch(batch: Batch, *, policy_column: str = "old_logprobs") -> dict[str, float]:
    """Return `training/rollout_probs_diff_*`, the correlation, and `rollout_corr/*` except metrics of weights.

    Args:
        batch: Needs loss_mask, rollout_logprobs and the learner's logprobs of the same weights.
        policy_column: Column of the learner's logprobs.

    Returns:
        Metrics by name, over trained tokens; empty without one. A perplexity that overflows float64 is infinite.

    Raises:
        DataError: The batch lacks a column.
    """
    ragged_mask = batch.ragged("loss_mask")
    mask = ragged_mask.values
    if not mask.any():
        return {}
    policy = batch.ragged(policy_column).values[mask].astype(np.float64)
    rollout = batch.ragged("rollout_logprobs").values[mask].astype(np.float64)
    rows = np.repeat(np.arange(len(batch)), ragged_mask.lengths)[mask]
    with np.errstate(over="ignore"):
        return _probability_metrics(policy, rollout) | _correction_metrics(policy, rollout, rows)


def _probability_metrics(policy: Array, rollout: Array) -> dict[str, float]:
    policy_probs, rollout_probs = np.exp(policy), np.exp(rollout)
    diff = np.abs(policy_probs - rollout_probs)
    metrics = {
        "training/rollout_probs_diff_mean": float(diff.mean()),
        "training/rollout_probs_diff_max": float(diff.max()),
    }
    if len(diff) >= 2:
        metrics["training/rollout_probs_diff_std"] = float(diff.std(ddof=1))
        if policy_probs.std() > 0 and rollout_probs.std() > 0:
            correlation = float(np.corrcoef(policy_probs, rollout_probs)[0, 1])
            metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics


def _correction_metrics(policy: Array, rollout: Array, rows: Array) -> dict[str, float]:
    log_ratio = policy - rollout
    _, row_of, counts = np.unique(rows, return_inverse=True, return_counts=True)
    policy_log_ppl = -np.bincount(row_of, weights=policy) / counts
    rollout_log_ppl = -np.bincount(row_of, weights=rollout) / counts
    log_ppl_diff = policy_log_ppl - rollout_log_ppl
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    sequence_log_ratio = np.bincount(row_of, weights=log_ratio)
    sequence_ratio = np.exp(np.clip(sequence_log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    values = {
        "kl": -log_ratio.mean(),
        "k3_kl": (np.expm1(log_ratio) - log_ratio).mean(),
        "training_ppl": np.exp(policy_log_ppl).mean(),
        "training_log_ppl": policy_log_ppl.mean(),
        "rollout_ppl": np.exp(rollout_log_ppl).mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": np.abs(log_ppl_diff).mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": np.exp(log_ppl_diff).mean(),
        "chi2_token": (ratio**2).mean() - 1.0,
        "chi2_seq": (sequence_ratio**2).mean() - 1.0,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in values.items()}
