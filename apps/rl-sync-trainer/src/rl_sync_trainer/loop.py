"""The synchronous loop: rollouts, advantages, a Megatron step, weights with proof; one after the other."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from rl_core import Batch, Lease, Prompt
from rl_core.errors import DeadlineError
from rl_core.publish import PublishReport, publish_weights
from rl_distill.objectives.batch_columns import with_advantages, with_correction_weights, with_loss_weights
from rl_metrics.mismatch_metrics import summarize_mismatch
from rl_metrics.reduction import Recorder
from rl_metrics.rollout_metrics import summarize_batch, summarize_components, summarize_speed, summarize_timings
from rl_rollout.rollout import GroupResult, require_some_success
from rl_sync_trainer.assemble import OLD_LOGPROBS, REFERENCE, TRAIN, Parts
from rl_sync_trainer.checkpoints import TrainerState
from rl_sync_trainer.evaluation import evaluate


async def train(parts: Parts, state: TrainerState) -> TrainerState:
    """Train until the last step; every state passed to `parts.on_state` is one to go on from."""
    settings = parts.settings.trainer
    await publish(parts, state.policy_version)
    if state.step == 0 and settings.validate_first and not state.results:
        state, metrics = await evaluate(parts, state, with_test=True)
        parts.log_metrics(0, metrics)
        parts.on_state(state)
    state = await finish_step(parts, state)
    while state.step < settings.steps:
        parts.stop.check()
        state = await train_step(parts, state)
        parts.on_state(state)
        state = await finish_step(parts, state)
    return state


async def finish_step(parts: Parts, state: TrainerState) -> TrainerState:
    """Validate, log and checkpoint a step that was trained; nothing where that is done.

    A run that was stopped while it validated is resumed here. The line of metrics comes before the checkpoint: killed
    between the two, a run trains the step again and replaces the line; the other way round the line would be lost.
    """
    if state.unlogged is None:
        return state
    settings = parts.settings.trainer
    metrics = dict(state.unlogged)
    is_last = state.step == settings.steps
    if is_last or is_due(state.step, settings.validate_every):
        state, found = await evaluate(parts, state, with_test=is_last)
        metrics |= found
    state = replace(state, unlogged=None)
    parts.log_metrics(state.step, metrics)
    parts.on_state(state)
    if is_last or is_due(state.step, settings.checkpoint_every):
        parts.save_checkpoint(state)
    return state


async def train_step(parts: Parts, state: TrainerState) -> TrainerState:
    """One step: a batch of rollouts, its optimizer updates, and the new weights in the engine."""
    started = time.perf_counter()
    recorder = Recorder(strict=parts.settings.metrics.strict)
    prompts = parts.source.next(parts.settings.rollout.prompts_per_step)
    with recorder.timer("gen"):
        num_groups = await parts.stop.run(
            collect_rollouts(parts, prompts, recorder),
            what=f"rollouts of step {state.step + 1}",
            deadline_s=parts.settings.rollout.deadline_s,
        )
    add_late_columns(parts, num_groups, recorder)
    size = len(prompts) // parts.settings.trainer.minibatches
    sizes = [min(size, num_groups - start) for start in range(0, num_groups, size)]
    batches = [train_minibatch(parts, recorder, num_groups=count) for count in sizes]
    version = state.policy_version + 1
    with recorder.timer("update_weights"):
        await publish(parts, version, recorder)
    parts.queue.forget_finished()
    step_s = time.perf_counter() - started
    record_step(parts, recorder, Batch.concat(batches), version=state.policy_version, step_s=step_s)
    return replace(
        state,
        step=state.step + 1,
        policy_version=version,
        prompt_source=parts.source.state(),
        num_samples=state.num_samples + sum(map(len, batches)),
        steps_wall_s=state.steps_wall_s + step_s,
        unlogged=recorder.reduce(),
    )


async def collect_rollouts(parts: Parts, prompts: Sequence[Prompt], recorder: Recorder) -> int:
    """Run every session of the prompts, and put each into the queue as it settles.

    Returns:
        Groups that can train; one whose sessions all failed cannot.
    """
    settings = parts.settings.rollout
    parts.queue.issue(prompts, num_sessions=settings.group_size)

    def settle(group: GroupResult) -> None:
        for index, session in enumerate(group.sessions):
            if session.failure is None:
                parts.queue.put(group.prompt.uid, index, session.trajectories)
            else:
                parts.queue.fail(group.prompt.uid, index, reason=session.failure)
        for trajectory in group.trajectories:
            recorder.record("timing_s/reward", trajectory.timings.reward_s)

    groups = await parts.rollout.run(
        prompts,
        num_sessions=settings.group_size,
        sampling=parts.sampling,
        seed=parts.settings.run.seed,
        on_group=settle,
    )
    require_some_success(groups)
    recorder.record("rollout/failed_sessions", sum(len(group.failures) for group in groups))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    timings = [trajectory.timings for trajectory in trajectories]
    parts.record(recorder, summarize_timings(Batch.from_trajectories(trajectories), timings))
    parts.record(recorder, summarize_components([trajectory.reward_components for trajectory in trajectories]))
    return sum(bool(group.trajectories) for group in groups)


def add_late_columns(parts: Parts, num_groups: int, recorder: Recorder) -> None:
    """Add the reference's logprobs, and the learner's own, where the settings ask for them."""
    temperature = parts.settings.rollout.temperature
    for task, column, scorer in (
        (REFERENCE, "reference_logprobs", parts.reference),
        (OLD_LOGPROBS, "old_logprobs", parts.learner if parts.recomputes_old_logprobs else None),
    ):
        if scorer is not None:
            lease = parts.lease(task, num_groups)
            with recorder.timer("ref" if task == REFERENCE else "old_log_prob"):
                parts.queue.ack(lease, {column: scorer.logprobs(lease.batch, temperature=temperature)})


def train_minibatch(parts: Parts, recorder: Recorder, *, num_groups: int) -> Batch:
    """Lease whole groups, take one optimizer step on them, and ack."""
    settings = parts.settings
    lease = parts.lease(TRAIN, num_groups)
    with recorder.timer("adv"):
        batch = prepare_batch(parts, lease)
    with recorder.timer("update_actor"):
        result = parts.learner.train_step(
            batch, parts.objective, temperature=settings.rollout.temperature, with_entropy=True
        )
    parts.queue.ack(lease)
    for name, value in {
        **result.metrics,
        "actor/loss": result.loss,
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.learning_rate,
    }.items():
        recorder.record(name, value)
    return batch


def prepare_batch(parts: Parts, lease: Lease) -> Batch:
    """Add what the objective needs: advantages, loss weights, correction weights."""
    algorithm = parts.settings.algorithm
    batch = lease.batch
    if algorithm.correction != "none":
        batch = with_correction_weights(batch, level=algorithm.correction, cap=algorithm.correction_cap)
    batch = with_advantages(batch, advantage=algorithm.advantage)
    return with_loss_weights(
        batch, aggregation=algorithm.aggregation, horizon=parts.settings.rollout.max_response_tokens
    )


async def publish(parts: Parts, version: int, recorder: Recorder | None = None) -> PublishReport:
    """Give the learner's weights to the engine, and prove that it serves them."""
    update = parts.transport.pack(parts.learner.export_weights(), version=version, tied=parts.learner.tied)
    deadline_s = parts.settings.rollout.deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            report = await publish_weights(update, [parts.engine], canary=parts.canary(), tolerances=parts.tolerances)
    except TimeoutError as error:
        raise DeadlineError(f"the engine had not taken policy version {version} after {deadline_s:g} s.") from error
    if recorder is not None:
        recorder.record("weights/num_tensors", report.num_tensors)
        recorder.record("weights/probe_max_diff", report.probe_max_diff)
        recorder.record("weights/canary_max_diff", report.canary_max_diff)
    return report


def record_step(parts: Parts, recorder: Recorder, batch: Batch, *, version: int, step_s: float) -> None:
    """Record what the batch says of rewards, lengths, staleness, mismatch and speed."""
    num_tokens = len(batch.ragged("input_ids").values)
    values = {
        **summarize_batch(batch, policy_version=version, max_prompt_tokens=parts.settings.prompts.max_tokens),
        **summarize_speed(num_tokens=num_tokens, num_trajectories=len(batch), step_s=step_s),
        "training/policy_version": version + 1,
        "training/epoch": parts.source.epoch,
    }
    if parts.recomputes_old_logprobs:
        values |= summarize_mismatch(batch)
    for name, value in values.items():
        recorder.record(name, value)
    recorder.record("timing_s/step", step_s)


def is_due(step: int, every: int) -> bool:
    """True at each multiple of `every`; never when it is 0."""
    return every > 0 and step % every == 0
