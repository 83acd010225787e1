"""Prepare a whole batch for the learner's updates."""

from rl_core import Batch
from rl_core.errors import DataError
from rl_distill.objectives import (
    correction_weight_metrics,
    with_advantages,
    with_correction_weights,
    with_distillation_advantages,
    with_kl_in_reward,
    with_rejection,
    with_token_selection,
)
from rl_distill.teacher import teacher_task
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning.distillation import (
    has_policy_gradient,
    has_teachers,
    learns_from_rewards,
    objective_options,
)
from rl_trainer_parts.learning.objective import make_selection
from rl_trainer_parts.learning.parts import LearningParts

TEACHER_COLUMNS = teacher_task(with_hidden=True).gives
"""Columns that advantages do not use."""


def prepare_batch(parts: LearningParts, batch: Batch, recorder: Recorder, *, kl_coefficient: float) -> Batch:
    """Add the objective's inputs except loss weights: advantages, the trained tokens and correction weights.

    Raises:
        DataError: A column is missing, or every token of the batch was rejected.
    """
    algorithm, correction = parts.settings.algorithm, parts.settings.correction
    if parts.settings.distillation.texts is not None:
        batch = batch.only(batch.names - {"rollout_logprobs"})  # the policy did not sample these tokens
    if not has_policy_gradient(parts.settings):
        return batch
    if algorithm.kl_in == "reward" and algorithm.kl_coefficient:
        batch = with_kl_in_reward(
            batch,
            coefficient=kl_coefficient,
            estimator=algorithm.kl_estimator,
            policy_logprobs=parts.sampled_logprobs,
        )
    if learns_from_rewards(parts.settings):
        rewarded = with_advantages(
            batch.only(batch.names - TEACHER_COLUMNS),
            advantage=algorithm.advantage,
            options=algorithm.advantage_options,
            session_rule=algorithm.session_rule,
        )
        batch = batch.with_columns({name: rewarded[name] for name in rewarded.names - batch.names})
    if has_teachers(parts.settings) and parts.settings.distillation.used_as == "reward":
        batch, metrics = with_distillation_advantages(
            batch,
            options=objective_options(parts.settings),
            policy_logprobs=parts.sampled_logprobs,
            keep_advantages=learns_from_rewards(parts.settings),
        )
        recorder.record_all(metrics)
        batch = batch.only(batch.names - TEACHER_COLUMNS)  # the advantages contain them
    if correction.weights != "none":
        level, cap, floor = correction.weights, correction.cap, correction.floor
        batch = with_correction_weights(batch, level=level, cap=cap, floor=floor)
        recorder.record_all(correction_weight_metrics(batch, level=level, cap=cap, floor=floor))
    if correction.reject:
        batch, metrics = with_rejection(batch, bounds=correction.reject)
        recorder.record_all(metrics)
        if not batch.ragged("loss_mask").values.any():
            raise DataError(
                f"correction.reject = {correction.reject} rejected every token of {len(batch)} trajectories. "
                "Widen its bounds, or check rollout_corr/kl: engine and learner may have different weights."
            )
    if (select := make_selection(parts.settings)) is not None:
        batch = with_token_selection(batch, select=select, policy_logprobs=parts.sampled_logprobs)
    return batch
