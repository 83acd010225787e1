"""Validation and test between steps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rl_core import Prompt
from rl_rollout.rollouter import policy_scores
from rl_rollout.skip import EntryKey
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_trainer_parts.reporting.failed_sessions import FailedSessions
from rl_trainer_parts.rollouts.answers import answers_of
from rl_trainer_parts.rollouts.evaluation import (
    answer_problems,
    draw_samples,
    measure_splits,
    summarize_answers,
    validation_sampling,
    with_results,
)


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
