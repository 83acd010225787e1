"""Stages of a step around the algorithm: rollouts into the queue, weights into the engine, metrics, validation."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from rl_core import Batch, Prompt
from rl_core.cluster import within
from rl_core.errors import WeightProofError
from rl_core.gpus import gpu_use_of
from rl_core.weights import PublishReport
from rl_core.weights.ipc import IpcTransport
from rl_metrics.reductions import (
    Recorder,
    batch_distributions,
    memory_metrics,
    summarize_components,
    summarize_gpus,
    summarize_timings,
    timing_distributions,
)
from rl_rollout import GroupResult, require_some_success, resolve_filter
from rl_rollout.refill import refill
from rl_rollout.rollouter import policy_scores, refusal, settle
from rl_rollout.skip import EntryKey
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_trainer_parts.learning.mixtures import replays
from rl_trainer_parts.learning.objective import needs_greedy
from rl_trainer_parts.reporting.failed_sessions import FailedSessions
from rl_trainer_parts.reporting.step_metrics import (
    reward_times,
    slowest_session,
    summarize_sessions,
    summarize_step,
)
from rl_trainer_parts.rollouts.answers import answers_of
from rl_trainer_parts.rollouts.evaluation import (
    answer_problems,
    draw_samples,
    measure_splits,
    summarize_answers,
    validation_sampling,
    with_results,
)
from rl_trainer_parts.rollouts.setup import (
    canary_prompts,
    groups_of_texts,
    proof_tolerances,
    put_trajectories,
    sampling_params,
    text_options,
)
from rl_trainer_parts.rollouts.skip_cache import record_replay
from rl_trainer_parts.rollouts.teacher_prompts import TeacherPrompts

OnGroups = Callable[[Sequence[GroupResult]], None]


class StepFeed:
    """Provides a step's groups, generated or replayed; each call is a separate part of the step in the cache.

    Attributes:
        replayed: uids of prompts whose groups and rewards were replayed.
    """

    def __init__(self, parts: Parts, recorder: Recorder, *, step: int) -> None:
        """Start a step; steps count from 1."""
        self._parts = parts
        self._recorder = recorder
        self._step = step
        self._num_parts = 0
        self.replayed: set[str] = set()

    async def run(self, prompts: Sequence[Prompt], *, on_groups: OnGroups | None = None) -> list[GroupResult]:
        """Groups of these prompts, passed to `on_groups` as they finish; a replay provides its own prompts' groups."""
        parts, group_size = self._parts, self._parts.settings.rollout.group_size
        key = EntryKey(step=self._step, part=self._num_parts)
        self._num_parts += 1
        rollouts = await parts.replay.rollouts(
            key,
            prompts,
            lambda: run_groups(parts, prompts, on_groups=on_groups),
            rollout=parts.rollout,
            sampling=sampling_params(parts.settings),
            num_sessions=group_size,
        )
        if parts.settings.rollout_cache.enabled:
            record_replay(self._recorder, rollouts)
        if rollouts.is_replayed:
            await self._issue(rollouts.groups)
            if on_groups is not None:
                on_groups(rollouts.groups)
        return list(rollouts.groups)

    async def _issue(self, groups: Sequence[GroupResult]) -> None:
        """Issue the replayed prompts, with as many sessions each as were stored."""
        if self._parts.settings.rollout_cache.rewards == "stored":
            self.replayed.update(group.prompt.uid for group in groups)
        for num_sessions, run in itertools.groupby(groups, key=lambda group: len(group.sessions)):
            await self._parts.issue([group.prompt for group in run], num_sessions=num_sessions)


async def collect_step(parts: Parts, recorder: Recorder, *, step: int) -> int:
    """Collect a step's rollouts in the queue, with teachers' scores if any; see `collect_rollouts`.

    Teachers score what has arrived while the rest is generated.

    Raises:
        DeadlineError: Rollouts or teachers took too long.
        StopRequestedError: The user stopped the run.
        TeacherError: A teacher cannot score.
    """
    settings = parts.settings
    what = f"rollouts of step {step}"
    deadline_s = settings.rollout.deadline_s

    async def generate() -> int:
        async with within(deadline_s, f"waited {deadline_s:g} s for the {what} and gave up."):
            with recorder.timer("gen"):
                return await collect_rollouts(parts, recorder, step=step)

    if parts.teachers is None:
        return await parts.stop.run(generate(), what=what, deadline_s=deadline_s)
    chosen = settings.distillation
    num_groups = await parts.stop.run(
        parts.teachers.serve_while(parts.queue, generate()),
        what=f"{what} and their teachers",
        deadline_s=deadline_s + 2 * (chosen.deadline_s + chosen.start_deadline_s),  # each has a shorter one
    )
    recorder.record("timing_s/teacher", parts.teachers.report.waited_s)
    recorder.record_all(parts.teachers.report.metrics())
    return num_groups


async def collect_rollouts(parts: Parts, recorder: Recorder, *, step: int) -> int:
    """Run every session of a step's prompts, and put the trainable groups into the queue.

    Args:
        parts: The run's parts.
        recorder: The step's recorder.
        step: Step number, from 1.

    Returns:
        Groups that can train; a group whose sessions all failed cannot.
    """
    num_prompts = parts.settings.rollout.prompts_per_step
    feed = StepFeed(parts, recorder, step=step)
    prompts = TeacherPrompts.of(parts.settings, parts.inputs.tokenizer)
    put = lambda pairs: put_trajectories(parts.queue, parts.settings, prompts.added(pairs))
    if not parts.settings.dynamic_sampling.filter:
        groups = await feed.run(
            parts.source.next(num_prompts), on_groups=lambda settled: settle(parts.queue, settled, put=put)
        )
        record_rollouts(parts, groups, recorder, step=step, replayed=feed.replayed)
        return sum(bool(group.trajectories) for group in groups)
    refilled = await refill(
        feed.run,
        parts.source.next,
        wanted=num_prompts,
        keep=resolve_filter(parts.settings.dynamic_sampling.filter),
        max_rounds=parts.settings.dynamic_sampling.max_rounds,
    )
    groups = [*refilled.groups, *refilled.failed]
    settle(parts.queue, groups, put=put)
    for group, reason in refilled.refused:
        settle(parts.queue, [group], refused=refusal(parts.settings.dynamic_sampling.filter, reason))
    recorder.record("rollout/num_rounds", refilled.num_rounds)
    recorder.record("rollout/refused_groups", len(refilled.refused) + refilled.num_made_up)
    recorder.record("rollout/made_up_groups", refilled.num_made_up)
    refused = [group for group, _ in refilled.refused]
    record_rollouts(parts, groups, recorder, step=step, replayed=feed.replayed, refused=refused)
    return len(refilled.groups)


async def run_groups(parts: Parts, prompts: Sequence[Prompt], *, on_groups: OnGroups | None) -> list[GroupResult]:
    """Issue prompts and run all their sessions, or use the teacher's texts instead."""
    texts = text_options(parts.settings, parts.inputs.tokenizer)
    if texts is not None:
        groups = groups_of_texts(prompts, texts, parts.inputs.tokenizer)
        for group in groups:
            await parts.issue([group.prompt], num_sessions=len(group.sessions))
        if on_groups is not None:
            on_groups(groups)
        return groups
    group_size = parts.settings.rollout.group_size
    await parts.issue(prompts, num_sessions=group_size)
    return await parts.rollout.run(
        prompts,
        num_sessions=group_size,
        sampling=sampling_params(parts.settings),
        seed=parts.settings.run.seed,
        on_group=None if on_groups is None else lambda group: on_groups([group]),
        with_baseline=needs_greedy(parts.settings),
    )


def record_rollouts(
    parts: Parts,
    groups: Sequence[GroupResult],
    recorder: Recorder,
    *,
    step: int,
    replayed: Collection[str] = (),
    refused: Sequence[GroupResult] = (),
) -> None:
    """Record the sessions' cost, and report the failed and the slowest ones.

    Args:
        parts: The run's parts.
        groups: The step's groups.
        recorder: The step's recorder.
        step: Step number, from 1.
        replayed: uids of prompts whose sessions took no time in this step.
        refused: Groups that a filter refused; only their time counts.

    Raises:
        RolloutError: Every session failed.
    """
    failed = FailedSessions.among(answers_of(groups, source="trainer"))
    failed.tell(parts.lifecycle.say, step=step, during="training")
    parts.lifecycle.rollouts.hold(failed.drafts(parts.settings, step=step))
    require_some_success(groups)
    recorder.record("rollout/failed_sessions", len(failed.failed))
    recorder.record("rollout/failed_rewards", failed.num_rewards)
    recorder.record_all(summarize_sessions(groups))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    timed = [trajectory for group in (*groups, *refused) for trajectory in group.timed]
    recorder.record_all(reward_times([one.timings for one in timed if one.prompt_uid not in replayed]))
    recorder.record_all(summarize_timings(timed))
    if parts.settings.metrics.has_details(step):
        recorder.record_distributions(timing_distributions([one.timings for one in timed]))
    recorder.record_all(summarize_components([trajectory.reward_components for trajectory in trajectories]))
    parts.lifecycle.say("slowest_session", step=step, **slowest_session(timed))


async def publish(parts: Parts, version: int, recorder: Recorder | None = None) -> PublishReport:
    """Send the learner's weights to the engine and prove that it serves them; retry a failed proof once.

    Raises:
        WeightProofError: The second proof failed too; names the first tensor that differs.
        DeadlineError: The engine did not load the weights in time.
    """
    deadline_s = parts.settings.rollout.deadline_s
    async with within(deadline_s, f"the engine did not load policy version {version} within {deadline_s:g} s."):
        try:
            report = await _publish_once(parts, version)
        except WeightProofError as error:
            parts.lifecycle.say("weight_proof_failed", version=version, tensor=error.tensor, error=str(error))
            report = await _publish_once(parts, version)
    if isinstance(parts.transport, IpcTransport):
        parts.transport.release()
    parts.replay.served(report, engine=parts.engine.traits.name)
    if recorder is not None:
        recorder.record("weights/num_tensors", report.num_tensors)
        recorder.record("weights/size_gb", report.size_bytes / 2**30)
        recorder.record("weights/probe_max_diff", report.probe_max_diff)
        recorder.record("weights/canary_max_diff", report.canary_max_diff)
    return report


async def _publish_once(parts: Parts, version: int) -> PublishReport:
    """Export, pack, send and prove the learner's weights; the learner frees memory for an engine that wakes."""
    settings, learners, tolerances = parts.settings, parts.learners, proof_tolerances(parts.settings)
    prompts = canary_prompts(settings, parts.inputs.train)
    sequences, images = [one.input_ids for one in prompts], [one.images for one in prompts]
    canary = learners.canary(sequences, images=images, replays=replays(settings))
    update = learners.pack(parts.transport, version=version, leaves=settings.trainer.offload_learner)
    await _wake_engine(parts)
    report = await parts.engine.publish(update, canary=canary, tolerances=tolerances)
    if not report.canary_scores:
        return report
    if settings.trainer.offload_learner:  # the learner scores the canary
        await rest_engine(parts, keeps_weights=True)
    report = learners.proven(canary, report, tolerances=tolerances)
    await _wake_engine(parts)
    return report


async def _wake_engine(parts: Parts) -> None:
    if parts.settings.trainer.offload_learner:
        parts.learners.offload()
    await parts.engine.wake()


async def rest_engine(parts: Parts, *, keeps_weights: bool = False) -> None:
    """Free the engine's memory for the learner, if the settings ask for it and the engine supports it.

    Args:
        parts: The run's parts.
        keeps_weights: The engine needs its weights again before the next update, so they must not be dropped.
    """
    rollout = parts.settings.rollout
    if rollout.offload_engine and parts.engine.traits.can_sleep:
        await parts.engine.sleep(1 if keeps_weights or rollout.offload_keeps_weights else 2)


async def gpu_metrics(parts: Parts) -> dict[str, float]:
    """Use of the GPUs of learner, engine and teachers since the last step; nothing on CPUs."""
    return {
        **summarize_gpus("perf", parts.learners.gpu_use()),
        **summarize_gpus("engine", await gpu_use_of(parts.engine)),
        **summarize_gpus("teacher", await gpu_use_of(parts.teachers)),
    }


def record_step(parts: Parts, recorder: Recorder, batch: Batch, *, step: int, version: int, step_s: float) -> None:
    """Record the batch's rewards, lengths, staleness, mismatch and speed, and the memory in use."""
    recorder.record_all(summarize_step(parts.settings, batch, version=version, step_s=step_s))
    if parts.settings.metrics.has_details(step):
        recorder.record_distributions(batch_distributions(batch))
    recorder.record_all({f"queue/{name}": value for name, value in parts.queue.stats().items()})
    recorder.record_all(memory_metrics() | parts.memory.step(step))
    recorder.record_all({"training/epoch": parts.source.epoch, "timing_s/step": step_s})


async def evaluate(
    parts: Parts, state: TrainerState, *, splits: Sequence[str]
) -> tuple[TrainerState, dict[str, float]]:
    """Evaluate on the prompts of each split, "validation" or "test", that the run has.

    Returns:
        The state with results such as `validation_accuracy_first` and `test_mean_reward_last`, and the metrics.
    """

    async def measure(split: str, problems: Sequence[Prompt]) -> dict[str, float]:
        what, key = f"{split} of step {state.step}", EntryKey(kind=split, step=state.step)
        evaluating = evaluate_problems(parts, problems, key=key, version=state.policy_version)
        with parts.lifecycle.console.phase(what, is_brief=True):
            return await parts.stop.run(evaluating, what=what, deadline_s=parts.settings.rollout.deadline_s)

    metrics = await measure_splits(parts.settings, parts.inputs, splits, measure)
    return replace(state, results=with_results(parts.settings, state.results, metrics)), metrics


async def evaluate_problems(
    parts: Parts, problems: Sequence[Prompt], *, key: EntryKey, version: int
) -> dict[str, float]:
    """Validation metrics of responses; some are sent to the trackers, and probes run."""
    settings = parts.settings
    rollouts = await parts.replay.rollouts(
        key,
        problems,
        lambda: answer_problems(settings, parts.rollout, problems),
        rollout=parts.rollout,
        sampling=validation_sampling(settings),
        num_sessions=settings.prompts.validation_samples,
    )
    answers = answers_of(rollouts.groups, source="trainer")
    FailedSessions.among(answers).tell(parts.lifecycle.say, step=key.step, during=key.kind)
    if settings.metrics.log_val_generations:
        samples = draw_samples(settings, answers, parts.inputs.tokenizer)
        parts.lifecycle.trackers.log_generations(key.step, f"{key.kind}/generations", samples)
    if key.kind == "validation":
        await parts.lifecycle.probes.ask(partial(policy_scores, parts.engine, version=version), answers, step=key.step)
    return summarize_answers(answers)
