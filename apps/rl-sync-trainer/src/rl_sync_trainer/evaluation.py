"""Validation and test between steps."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rl_rollout.prompts import PromptSet
from rl_rollout.rollouter import policy_scores
from rl_rollout.skip import EntryKey
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_trainer_parts.reporting.failed_sessions import FailedSessions
from rl_trainer_parts.rollouts.answers import answers_of
from rl_trainer_parts.rollouts.evaluation import (
    answer_problems,
    chosen_problems,
    draw_samples,
    measured,
    summarize_answers,
    validation_sampling,
    with_results,
)

TESTING = "timing_s/testing"


async def evaluate(
    parts: Parts, state: TrainerState, *, splits: Sequence[str]
) -> tuple[TrainerState, dict[str, float]]:
    """Evaluate on the prompts of each split, "validation" or "test", that the run has.

    Returns:
        The state with results such as `validation_accuracy_first` and `test_mean_reward_last`, and the metrics.
    """
    metrics: dict[str, float] = {}
    started = time.perf_counter()
    for split in splits:
        prompts = {"validation": parts.inputs.validation, "test": parts.inputs.test}[split]
        if prompts is None:
            continue
        what = f"{split} of step {state.step}"
        evaluating = evaluate_prompts(
            parts, prompts, key=EntryKey(kind=split, step=state.step), version=state.policy_version
        )
        with parts.lifecycle.console.phase(what, is_brief=True):
            of_split = await parts.stop.run(evaluating, what=what, deadline_s=parts.settings.rollout.deadline_s)
        if split == "validation":
            metrics |= of_split
        else:
            metrics |= {f"test/{name}": value for name, value in measured(parts.settings, of_split).items()}
    results = with_results(parts.settings, state.results, metrics)
    if metrics:
        metrics[TESTING] = time.perf_counter() - started
    return replace(state, results=results), metrics


async def evaluate_prompts(parts: Parts, prompts: PromptSet, *, key: EntryKey, version: int) -> dict[str, float]:
    """Validation metrics of responses; some are sent to the trackers, and probes run."""
    settings = parts.settings
    problems = chosen_problems(settings, prompts)
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
