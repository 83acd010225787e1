"""Stages of a step around the algorithm: rollouts into the queue, weights into the engine, metrics of the batch."""

import asyncio
from collections.abc import Sequence

import numpy as np

from rl_core import Batch, Prompt, Trajectory
from rl_core.errors import DataError, DeadlineError, WeightProofError
from rl_core.publish import PublishReport
from rl_distill.objectives.batch_columns import with_reward_components
from rl_metrics.mismatch_metrics import summarize_mismatch
from rl_metrics.reduction import Recorder
from rl_metrics.rollout_metrics import (
    spread,
    summarize_batch,
    summarize_components,
    summarize_speed,
    summarize_timings,
)
from rl_rollout.engines.replicas import publish_to
from rl_rollout.rollout import GroupResult, require_some_success
from rl_sync_trainer.assemble import Parts, gdpo_components


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
                put_session(parts, group.prompt.uid, index, session.trajectories)
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


def put_session(parts: Parts, prompt_uid: str, index: int, trajectories: Sequence[Trajectory]) -> None:
    """Settle a session in the queue, with the components of its rewards where the advantage compares them.

    Raises:
        DataError: A trajectory lacks such a component.
    """
    names = gdpo_components(parts.settings)
    if not names or not trajectories:
        parts.queue.put(prompt_uid, index, trajectories)
        return
    for trajectory in trajectories:
        lacking = sorted(set(names) - trajectory.reward_components.keys())
        if lacking:
            raise DataError(
                f"algorithm.advantage_options.weights names the component {lacking[0]!r}, but the reward function gave "
                f"{sorted(trajectory.reward_components) or 'none'} for prompt {prompt_uid}. Let it return every "
                "component for every response."
            )
    components = [{name: trajectory.reward_components[name] for name in names} for trajectory in trajectories]
    parts.queue.put_batch(with_reward_components(Batch.from_trajectories(trajectories), components))


async def publish(parts: Parts, version: int, recorder: Recorder | None = None) -> PublishReport:
    """Give the learner's weights to the engine, and prove that it serves them; a failed proof is tried once more.

    Raises:
        WeightProofError: The second proof failed too; the message names the first tensor that differs.
        DeadlineError: The engine did not take the weights in time.
    """
    deadline_s = parts.settings.rollout.deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            try:
                report = await _publish_once(parts, version)
            except WeightProofError as error:
                parts.say("weight_proof_failed", version=version, tensor=error.tensor, error=str(error))
                report = await _publish_once(parts, version)
    except TimeoutError as error:
        raise DeadlineError(f"the engine had not taken policy version {version} after {deadline_s:g} s.") from error
    if recorder is not None:
        recorder.record("weights/num_tensors", report.num_tensors)
        recorder.record("weights/probe_max_diff", report.probe_max_diff)
        recorder.record("weights/canary_max_diff", report.canary_max_diff)
    return report


async def _publish_once(parts: Parts, version: int) -> PublishReport:
    """From the learner's tensors on: export, pack, update, proof; the learner makes room for an engine that wakes."""
    policy, canary = parts.learners.policy, parts.canary()
    update = parts.transport.pack(policy.export_weights(), version=version, tied=policy.tied)
    if parts.settings.trainer.offload:
        parts.learners.offload()
    await parts.engine.wake()
    return await publish_to(parts.engine, update, canary=canary, tolerances=parts.tolerances)


async def rest_engine(parts: Parts) -> None:
    """Let the engine free its memory for the learner, where that is set and it can."""
    if parts.settings.rollout.sleep and parts.engine.traits.can_sleep:
        await parts.engine.sleep()


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
    if "token_rewards" in batch:
        penalties = batch.ragged("token_rewards")
        sums = np.asarray([row.sum(dtype=np.float64) for row in penalties])
        values |= spread("critic/rewards", batch.dense("reward") + sums)
    for name, value in values.items():
        recorder.record(name, value)
    recorder.record("timing_s/step", step_s)
