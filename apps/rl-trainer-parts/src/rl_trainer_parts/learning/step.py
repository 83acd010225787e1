"""The learner's side of a step in both trainers: late columns, advantages, updates, KL coefficient."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rl_core import Batch, Ragged
from rl_core.data import token_positions
from rl_core.errors import DataError
from rl_distill.learner import StepResult
from rl_distill.learners import Learners
from rl_distill.objectives import (
    AdaptiveKL,
    ValueObjective,
    correction_weight_metrics,
    mean_reference_kl,
    with_advantages,
    with_correction_weights,
    with_distillation_advantages,
    with_kl_in_reward,
    with_loss_weights,
    with_rejection,
    with_token_selection,
    without_truncated,
)
from rl_distill.skipping import SkippedUpdates
from rl_distill.teacher import teacher_task, with_self_scores
from rl_metrics.reductions import Recorder
from rl_trainer_parts.learning.objective import (
    has_policy_gradient,
    learns_from_rewards,
    make_kl_control,
    make_objective,
    make_selection,
    needs_energy,
    objective_options,
    sampled_logprobs,
)
from rl_trainer_parts.settings.algorithm_choice import options_of
from rl_trainer_parts.settings.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningParts:
    """Everything a learning step needs.

    Attributes:
        settings: The user's settings.
        learners: Policy, reference and critic.
        skipped: Counts skipped updates, whose loss or gradients were not finite.
    """

    settings: Settings
    learners: Learners
    skipped: SkippedUpdates


def learn(
    parts: LearningParts, rows: Batch, recorder: Recorder, *, step: int, kl_state: Mapping[str, float]
) -> tuple[Batch, dict[str, float]]:
    """Train on a step's rows.

    Args:
        parts: The learner's side.
        rows: Whole groups from rollouts and teachers.
        recorder: The step's recorder.
        step: Step number, from 1.
        kl_state: State of the KL coefficient after the previous step; empty before the first.

    Returns:
        The trained batch, with the tokens that the correction rejected and the update's per-token results; and the
        state of the KL coefficient for the next step.

    Raises:
        DataError: A column is missing, or the correction rejected every token.
        NonFiniteError: Too many consecutive updates were not finite.
    """
    kl = make_kl_control(parts.settings)
    kl = kl.restored(kl_state) if kl_state else kl
    record_replay(parts, rows, recorder, step=step)
    rows = with_late_columns(parts, rows, recorder)
    with recorder.timer("adv"):
        prepared = prepare_batch(parts, rows, recorder, kl_coefficient=kl.coefficient)
    computed = update(parts, prepared, recorder, step=step - 1, kl_coefficient=kl.coefficient)
    trained = with_update(prepared, computed, loss_mask=rows.ragged("loss_mask"))
    return trained, adapted_kl(parts, kl, trained, recorder).state()


def record_replay(parts: LearningParts, rows: Batch, recorder: Recorder, *, step: int) -> None:
    """Record, on a sample, the mismatch between engine and learner with and without replay of the engine's experts.

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


def with_late_columns(parts: LearningParts, rows: Batch, recorder: Recorder) -> Batch:
    """Add the reference's, the learner's and its own teacher's logprobs and values, if the settings need them."""
    temperature, learners = parts.settings.rollout.temperature, parts.learners
    if learners.reference is not None and parts.settings.algorithm.kl_coefficient:
        with recorder.timer("ref"):
            found = learners.reference.logprobs(rows, temperature=temperature)
        rows = rows.with_columns({"reference_logprobs": found})
    if parts.settings.algorithm.old_logprobs == "recompute":
        with recorder.timer("old_log_prob"):
            found = learners.policy.logprobs(rows, temperature=temperature)
            added = {"old_logprobs": found}
            if needs_energy(parts.settings):
                # At half the temperature, a logprob is 2 * logprob - log(sum of squared probabilities).
                sharper = learners.policy.logprobs(rows, temperature=temperature / 2)
                added["sum_pi_squared"] = Ragged(np.exp(2 * found.values - sharper.values), found.offsets)
        rows = rows.with_columns(added)
    if learners.critic is not None:
        with recorder.timer("values"):
            found = learners.critic.values(for_critic(rows))
        rows = rows.with_columns({"values": found})
    if learners.self_teacher is not None:
        keeps_prompts = not parts.settings.distillation.self_teacher.prompts
        with recorder.timer("teacher"):
            rows = with_self_scores(rows, learners.self_teacher, keeps_prompts=keeps_prompts)
    return rows


def adapted_kl(parts: LearningParts, kl: AdaptiveKL, batch: Batch, recorder: Recorder) -> AdaptiveKL:
    """Record the KL to the reference, and adapt the coefficient for the next step."""
    algorithm = parts.settings.algorithm
    if not algorithm.kl_coefficient:
        return kl
    # "k3+" and "k3" have the same value. With kl_in = "reward", this is the penalty that was subtracted.
    measured = mean_reference_kl(
        batch, estimator=algorithm.kl_estimator, policy_logprobs=sampled_logprobs(parts.settings)
    )
    recorder.record("actor/kl_coef", kl.coefficient)
    recorder.record("actor/reference_kl", measured)
    return kl.adapted(measured, num_trajectories=len(batch))


TEACHER_COLUMNS = teacher_task(with_hidden=True).gives
"""Columns that advantages do not use."""


def prepare_batch(parts: LearningParts, batch: Batch, recorder: Recorder, *, kl_coefficient: float) -> Batch:
    """Add the objective's inputs except loss weights: correction weights, advantages, the trained tokens.

    Raises:
        DataError: A column is missing, or the correction rejected every token of the batch.
    """
    correction, is_policy_gradient = parts.settings.correction, has_policy_gradient(parts.settings)
    if parts.settings.distillation.texts is not None:
        batch = batch.only(batch.names - {"rollout_logprobs"})  # the policy did not sample these tokens
    if is_policy_gradient and correction.weights != "none":
        level, cap, floor = correction.weights, correction.cap, correction.floor
        batch = with_correction_weights(batch, level=level, cap=cap, floor=floor)
        recorder.record_all(correction_weight_metrics(batch, level=level, cap=cap, floor=floor))
    if is_policy_gradient:
        batch = _with_advantages(parts, batch, recorder, kl_coefficient=kl_coefficient)
    if parts.settings.rollout.mask_truncated:
        batch, share = without_truncated(batch)
        recorder.record("response/masked_ratio", share, weight=len(batch))
    if not is_policy_gradient or not batch.ragged("loss_mask").values.any():
        return batch
    if correction.reject:
        batch, metrics = with_rejection(batch, bounds=correction.reject)
        recorder.record_all(metrics)
        if not batch.ragged("loss_mask").values.any():
            raise DataError(
                f"correction.reject = {correction.reject} rejected every token of {len(batch)} trajectories. "
                "Widen its bounds, or check rollout_corr/kl: engine and learner may have different weights."
            )
    if (select := make_selection(parts.settings)) is not None:
        batch = with_token_selection(batch, select=select, policy_logprobs=sampled_logprobs(parts.settings))
    return batch


def _with_advantages(parts: LearningParts, batch: Batch, recorder: Recorder, *, kl_coefficient: float) -> Batch:
    """Add the advantages, from task rewards, teachers or both."""
    algorithm = parts.settings.algorithm
    if algorithm.kl_in == "reward" and algorithm.kl_coefficient:
        batch = with_kl_in_reward(
            batch,
            coefficient=kl_coefficient,
            estimator=algorithm.kl_estimator,
            policy_logprobs=sampled_logprobs(parts.settings),
        )
    if learns_from_rewards(parts.settings):
        if algorithm.advantage == "maxrl" and (lowest := batch.dense("reward").min()) < 0:
            raise DataError(
                f"maxrl needs rewards of at least 0; found {lowest:g}. Shift them, or use another algorithm."
            )
        rewarded = with_advantages(
            batch.only(batch.names - TEACHER_COLUMNS),
            advantage=algorithm.advantage,
            options=options_of(algorithm, "advantage"),
            session_rule=algorithm.session_rule,
        )
        batch = batch.with_columns({name: rewarded[name] for name in rewarded.names - batch.names})
    if parts.settings.distillation.has_teacher and parts.settings.distillation.used_as == "reward":
        batch, metrics = with_distillation_advantages(
            batch,
            options=objective_options(parts.settings),
            policy_logprobs=sampled_logprobs(parts.settings),
            keep_advantages=learns_from_rewards(parts.settings),
        )
        recorder.record_all(metrics)
        batch = batch.only(batch.names - TEACHER_COLUMNS)  # the advantages contain them
    return batch


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
        A mini-batch without a trained token makes no update: the optimizer's momentum would move the weights.

    Raises:
        NonFiniteError: Too many consecutive updates were not finite.
    """
    settings = parts.settings
    critic_alone = parts.learners.critic is not None and step < settings.critic.head_start_steps
    objective = make_objective(settings, kl_coefficient)
    seen: list[tuple[Batch, StepResult]] = []
    for part in minibatches(batch, count=settings.trainer.minibatches, epochs=settings.trainer.epochs):
        if not part.ragged("loss_mask").values.any():
            continue
        weighted = with_loss_weights(
            part,
            aggregation=settings.algorithm.aggregation,
            horizon=settings.rollout.max_response_tokens,
        )
        if parts.learners.critic is not None:
            with recorder.timer("update_critic"):
                loss = ValueObjective(clip=settings.critic.value_clip)
                result = parts.learners.critic.train_step(for_critic(weighted), loss)
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
    """The batch for routers that choose for themselves."""
    return batch.only(batch.names - {"routed_experts"})


def for_critic(batch: Batch) -> Batch:
    """The batch for the critic, which uses neither the policy's routed experts nor its distributions."""
    return batch.only(batch.names - {"routed_experts", "nucleus_ids"})


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
    columns = {
        name: Ragged(np.where(unscored, np.float32(np.nan), column.values), column.offsets)
        for name, column in results.items()
    }
    return prepared.with_columns({"loss_mask": loss_mask, **columns})


def _in_row_order(batch: Batch, seen: list[tuple[Batch, StepResult]]) -> dict[str, Ragged]:
    """Merge per-token results of mini-batches; rows in none of them get 0."""
    ids, row_of = batch.ragged("input_ids"), {key: row for row, key in enumerate(batch.keys)}
    found: dict[str, Ragged] = {}
    for part, result in seen:
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
