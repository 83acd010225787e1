"""Greedy accuracy on the validation and test problems, between the steps."""

import time
from collections.abc import Sequence
from dataclasses import replace

from rl_core import Prompt
from rl_metrics.validation import headline
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.prompts import PromptSet
from rl_rollout.rollout import GroupResult
from rl_rollout.skip import EntryKey
from rl_sync_trainer.assemble import Parts
from rl_trainer.checkpoints import TrainerState
from rl_trainer.evaluation import draw_samples, generation_samples, validation_metrics, with_accuracies
from rl_trainer.probing import CANDIDATES


async def evaluate(parts: Parts, state: TrainerState, *, with_test: bool) -> tuple[TrainerState, dict[str, float]]:
    """Evaluate the validation problems, and the test problems where asked for.

    Returns:
        The state with `validation_accuracy_{first,last}` and `test_accuracy_{first,last}` in its results, and the
        metrics.
    """
    results = dict(state.results)
    metrics: dict[str, float] = {}
    started = time.perf_counter()
    for split, prompts in (("validation", parts.inputs.validation), ("test", parts.inputs.test if with_test else None)):
        if prompts is None:
            continue
        found = await parts.stop.run(
            evaluate_prompts(parts, prompts, key=EntryKey(kind=split, step=state.step), version=state.policy_version),
            what=f"{split} of step {state.step}",
            deadline_s=parts.settings.rollout.deadline_s,
        )
        accuracy = headline(found)
        results = with_accuracies(results, {split: accuracy})
        if split == "validation":
            metrics |= found
        elif accuracy is not None:
            metrics["test/accuracy"] = accuracy
    if metrics:
        metrics["timing_s/testing"] = time.perf_counter() - started
    return replace(state, results=results), metrics


async def evaluate_prompts(parts: Parts, prompts: PromptSet, *, key: EntryKey, version: int) -> dict[str, float]:
    """Greedy responses to prompts, as validation metrics; the trackers are given some, and probes are asked."""

    async def run(chosen: Sequence[Prompt], sampling: SamplingParams) -> Sequence[GroupResult]:
        found = await parts.replay.rollouts(
            key,
            chosen,
            lambda: parts.rollout.run(chosen, num_sessions=1, sampling=sampling),
            rollout=parts.rollout,
            sampling=sampling,
            num_sessions=1,
        )
        return found.groups

    metrics, groups = await validation_metrics(parts.settings, prompts, run)
    if parts.settings.metrics.log_val_generations:
        samples = generation_samples(groups, parts.inputs.tokenizer, source="trainer")
        parts.log_generations(key.step, f"{key.kind}/generations", draw_samples(parts.settings, samples))
    if parts.probes is not None and key.kind == "validation":
        await parts.probes.ask(
            lambda sequences, top_k: parts.engine.score_top_k(sequences, top_k=top_k),
            groups,
            step=key.step,
            version=version,
            top_k=min(CANDIDATES, parts.engine.traits.max_top_k),
        )
    return metrics
