"""Optimizer updates of policy and critic over the epochs and mini-batches of a step."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from rl_core import Batch, Ragged
from rl_core.data import token_positions
from rl_distill.learner import StepResult
from rl_distill.objectives import ValueObjective, with_loss_weights
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning.objective import make_objective
from rl_trainer_parts.learning.parts import LearningParts


def update(
    parts: LearningParts, batch: Batch, recorder: Recorder, *, step: int, kl_coefficient: float
) -> dict[str, Ragged]:
    """Train on a step's batch, in as many epochs and mini-batches as the settings ask for.

    Args:
        parts: The learner's side.
        batch: The prepared batch.
        recorder: The step's recorder.
        step: Number of finished steps.
        kl_coefficient: Weight of the KL in the loss.

    Returns:
        "policy_logprobs" and "entropy" of the trained tokens, as in their first update; {} if the policy did not train.

    Raises:
        NonFiniteError: Too many consecutive updates were not finite.
    """
    settings = parts.settings
    critic_alone = parts.learners.critic is not None and step < settings.critic.head_start_steps
    objective = make_objective(settings, kl_coefficient)
    seen: list[tuple[Batch, StepResult]] = []
    for part in minibatches(batch, count=settings.trainer.minibatches, epochs=settings.trainer.epochs):
        weighted = with_loss_weights(
            part,
            aggregation=settings.algorithm.aggregation,
            horizon=settings.rollout.max_response_tokens,
        )
        if parts.learners.critic is not None:
            with recorder.timer("update_critic"):
                loss = ValueObjective(clip=settings.critic.value_clip)
                result = parts.learners.critic.train_step(without_experts(weighted), loss)
                _record(parts, recorder, "critic", result, weighted)
        if not critic_alone:
            with recorder.timer("update_actor"):
                result = parts.learners.policy.train_step(
                    weighted,
                    objective,
                    temperature=settings.rollout.temperature,
                    with_entropy=True,
                    with_tokens=True,
                )
            if all(part is not known for known, _ in seen):  # each epoch has the same parts
                seen.append((part, result))
            _record(parts, recorder, "actor", result, weighted)

    return _in_row_order(batch, seen)


def without_experts(batch: Batch) -> Batch:
    """The batch for another model than the policy, which cannot use the policy's routed experts."""
    return batch.only(batch.names - {"routed_experts"})


def with_update(prepared: Batch, results: Mapping[str, Ragged], *, loss_mask: Ragged) -> Batch:
    """A trained batch as metrics and records show it.

    Args:
        prepared: The batch that was trained.
        results: Result of `update`.
        loss_mask: Mask that includes the tokens rejected by the correction: sampled, but not scored by the update.

    Returns:
        The batch with that mask and the update's results; NaN where the update did not score.
    """
    trained, mask = prepared.ragged("loss_mask").values, loss_mask.values
    unscored = mask & ~trained
    columns = dict(results)
    if unscored.any():
        for name, column in results.items():
            columns[name] = Ragged(np.where(unscored, np.float32(np.nan), column.values), column.offsets)
    return prepared.with_columns({"loss_mask": loss_mask, **columns})


def _in_row_order(batch: Batch, seen: list[tuple[Batch, StepResult]]) -> dict[str, Ragged]:
    """Merge per-token results of mini-batches; rows in none of them get 0."""
    ids = batch.ragged("input_ids")
    row_of = {key: row for row, key in enumerate(batch.keys)} if len(seen) > 1 else {}
    found: dict[str, Ragged] = {}
    for part, result in seen:
        if part is batch:
            return dict(result.tokens)
        rows = np.asarray([row_of[key] for key in part.keys], dtype=np.int64)
        places = token_positions(ids.offsets[rows], ids.lengths[rows])
        for name, column in result.tokens.items():
            whole = found.setdefault(name, Ragged(np.zeros(len(ids.values), dtype=np.float32), ids.offsets))
            whole.values[places] = column.values
    return found


def minibatches(batch: Batch, *, count: int, epochs: int) -> Iterator[Batch]:
    """Split a batch into mini-batches of whole groups, as equal as possible; repeated for each epoch.

    Args:
        batch: A step's batch.
        count: Mini-batches; fewer if there are fewer groups.
        epochs: Number of passes.
    """
    group = batch.group_index()
    num_groups = int(group.max()) + 1
    edges = np.linspace(0, num_groups, min(count, num_groups) + 1).round().astype(np.int64)
    parts = [batch]
    if len(edges) > 2:
        rows = (np.flatnonzero((group >= start) & (group < stop)) for start, stop in itertools.pairwise(edges))
        parts = [batch.select(part) for part in rows]
    for _ in range(epochs):
        yield from parts


def _record(parts: LearningParts, recorder: Recorder, who: str, result: StepResult, batch: Batch) -> None:
    """Record an update, and count it if it was skipped."""
    recorder.record(f"{who}/skipped_updates", 0.0 if result.is_applied else 1.0)
    parts.skipped.check(result, batch, what=who)
    if not result.is_applied:
        return
    recorder.record_all(result.metrics)
    recorder.record(f"{who}/grad_norm", result.grad_norm)
    recorder.record(f"{who}/lr", result.learning_rate)
    if who == "actor":
        recorder.record("actor/loss", result.loss)
        num_tokens = len(batch.ragged("input_ids").values)
        recorder.record("perf/computed_tokens", result.computed_tokens)
        recorder.record("perf/saved_tokens", num_tokens - result.computed_tokens)
        recorder.record("perf/saved_share", 1.0 - result.computed_tokens / num_tokens)
