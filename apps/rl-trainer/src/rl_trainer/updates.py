"""What a step does with its batch: optimizer updates of the policy and the critic, over epochs and mini-batches."""

import itertools
from collections.abc import Iterator

import numpy as np

from rl_core import Batch
from rl_distill.learner import StepResult
from rl_distill.objectives.batch_columns import with_loss_weights
from rl_distill.objectives.value_objective import value_objective
from rl_metrics.reduction import Recorder
from rl_trainer.learning import LearningParts


def update(parts: LearningParts, batch: Batch, recorder: Recorder, *, step: int, kl_coefficient: float) -> None:
    """Train on a step's batch, as often and in as many parts as the settings say.

    Args:
        parts: Of the run.
        batch: Prepared.
        recorder: Of the step.
        step: Steps done before it.
        kl_coefficient: In the loss.

    Raises:
        NonFiniteError: Too many updates in a row were not finite.
    """
    settings = parts.settings
    critic_alone = parts.learners.critic is not None and step < settings.critic.head_start_steps
    objective = parts.objective_at(kl_coefficient)
    for part in minibatches(batch, count=settings.trainer.minibatches, epochs=settings.trainer.epochs):
        weighted = with_loss_weights(
            part,
            aggregation=settings.algorithm.aggregation,
            horizon=settings.rollout.max_response_tokens,
        )
        if parts.learners.critic is not None:
            with recorder.timer("update_critic"):
                loss = value_objective(clip=settings.critic.value_clip)
                _record(parts, recorder, "critic", parts.learners.critic.train_step(weighted, loss), weighted)
        if not critic_alone:
            with recorder.timer("update_actor"):
                result = parts.learners.policy.train_step(
                    weighted, objective, temperature=settings.rollout.temperature, with_entropy=True
                )
            _record(parts, recorder, "actor", result, weighted)


def minibatches(batch: Batch, *, count: int, epochs: int) -> Iterator[Batch]:
    """Parts of a batch with whole groups, as equal as can be; once for each epoch.

    Args:
        batch: Of a step.
        count: Parts; fewer where there are fewer groups.
        epochs: How often to go through.
    """
    group = batch.group_index()
    num_groups = int(group.max()) + 1
    edges = np.linspace(0, num_groups, min(count, num_groups) + 1).round().astype(np.int64)
    parts = (
        [batch]
        if len(edges) == 2
        else [
            batch.select(np.flatnonzero((group >= start) & (group < stop))) for start, stop in itertools.pairwise(edges)
        ]
    )
    for _ in range(epochs):
        yield from parts


def _record(parts: LearningParts, recorder: Recorder, who: str, result: StepResult, batch: Batch) -> None:
    """Record an update, and count it where it was skipped."""
    recorder.record(f"{who}/skipped_updates", 0.0 if result.is_applied else 1.0)
    parts.skipped.check(result, batch, what=who)
    if not result.is_applied:
        return
    recorder.record_all(result.metrics)
    recorder.record(f"{who}/grad_norm", result.grad_norm)
    recorder.record(f"{who}/lr", result.learning_rate)
    if who == "actor":
        recorder.record("actor/loss", result.loss)
