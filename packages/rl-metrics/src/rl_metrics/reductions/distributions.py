"""Values of a step's distribution metrics, as pure functions of a batch and its sessions' timings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import Batch, Timings
from rl_metrics.reductions.rollouts import group_stds

Array = NDArray[Any]

TOKEN_COLUMNS = {
    "advantages": "advantage",
    "entropy": "entropy",
    "rollout_logprobs": "logprob",
    "correction_weights": "correction_weight",
}
"""Token columns with a distribution over trained tokens, and its name."""

UPDATE_COLUMNS = ("entropy", "policy_logprobs")
"""Columns from an update; NaN values mark tokens that it did not score, and are ignored."""

LEARNER_COLUMNS = ("old_logprobs", "policy_logprobs")
"""Columns of the learner's logprobs before the update; the first existing one is used."""


def batch_distributions(batch: Batch) -> dict[str, Array]:
    """Return values for `Recorder.record_values` of a batch's rewards, lengths and trained tokens.

    Args:
        batch: Needs input_ids, loss_mask and num_prompt_tokens; uses reward, advantages, rollout_logprobs, old_logprobs
            or policy_logprobs, entropy and correction_weights if it has them.

    Returns:
        Arrays by metric, each with at least one value.
    """
    prompt_lengths = batch.dense("num_prompt_tokens").astype(np.int64)
    found: dict[str, Array] = {
        "prompt_length": prompt_lengths,
        "response_length": batch.ragged("input_ids").lengths - prompt_lengths,
    }
    if "reward" in batch:
        rewards = batch.dense("reward").astype(np.float64)
        is_scored = ~np.isnan(rewards)
        found["reward"] = rewards[is_scored]
        with np.errstate(invalid="ignore"):  # infinite rewards result in NaN, which is counted
            found["group_reward_std"] = group_stds(rewards[is_scored], batch.group_index()[is_scored])
    mask = batch.ragged("loss_mask").values
    for column, name in TOKEN_COLUMNS.items():
        if column in batch:
            values = batch.ragged(column).values[mask]
            found[name] = values[~np.isnan(values)] if column in UPDATE_COLUMNS else values
    learner = next((column for column in LEARNER_COLUMNS if column in batch), None)
    if learner is not None and "rollout_logprobs" in batch:
        rollout = batch.ragged("rollout_logprobs").values[mask].astype(np.float64)
        with np.errstate(invalid="ignore"):
            ratios = batch.ragged(learner).values[mask] - rollout
        found["log_ratio"] = ratios[~np.isnan(ratios)] if learner in UPDATE_COLUMNS else ratios
    return {f"distribution/{name}": values for name, values in found.items() if values.size}


def timing_distributions(timings: Sequence[Timings]) -> dict[str, Array]:
    """Return values for `Recorder.record_values` of the trajectories' times; empty without a trajectory."""
    if not timings:
        return {}
    parts = ("generate_s", "tools_s", "reward_s")
    return {f"distribution/{part}": np.asarray([getattr(timing, part) for timing in timings]) for part in parts}
