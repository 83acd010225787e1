"""Measure, on a sample, how replaying the engine's experts changes the mismatch between engine and learner."""

import numpy as np

from rl_core import Batch
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning.parts import LearningParts
from rl_trainer_parts.learning.updates import without_experts


def record_replay(parts: LearningParts, rows: Batch, recorder: Recorder, *, step: int) -> None:
    """Record the mismatch with and without replay, in steps where it is due.

    Args:
        parts: The learner's side.
        rows: The step's rows before its update, with `routed_experts` if the policy is a mixture that replays.
        recorder: The step's recorder.
        step: Step number, from 1.
    """
    settings = parts.settings
    count = min(settings.metrics.replay_rows, len(rows))
    if not count or "routed_experts" not in rows or not settings.metrics.has_details(step):
        return
    sample = rows.select(np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64)))  # spread over the groups
    mask = sample.ragged("loss_mask").values
    if not mask.any():
        return
    rollout = sample.ragged("rollout_logprobs").values[mask].astype(np.float64)
    with recorder.timer("replay_mismatch"):
        for name, batch in (("replay", sample), ("no_replay", without_experts(sample))):
            found = parts.learners.policy.logprobs(batch, temperature=settings.rollout.temperature)
            log_ratio = found.values[mask] - rollout
            with np.errstate(over="ignore"):
                recorder.record(f"router/k3_kl/{name}", float((np.expm1(log_ratio) - log_ratio).mean()))
            recorder.record(f"router/logprobs_diff_mean/{name}", float(np.abs(log_ratio).mean()))
