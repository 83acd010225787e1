"""Greedy accuracy on the validation and test problems."""

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from rl_core import Prompt
from rl_core.durable_files import write_durably
from rl_metrics.validation import ValidationResponses, headline, summarize_validation
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.prompts import PromptSet
from rl_rollout.rollout import GroupResult
from rl_rollout.skip import EntryKey
from rl_sync_trainer.assemble import Parts
from rl_sync_trainer.checkpoints import TrainerState
from rl_sync_trainer.settings import Settings

Run = Callable[[Sequence[Prompt], SamplingParams], Awaitable[Sequence[GroupResult]]]


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
            evaluate_prompts(parts, prompts, key=EntryKey(kind=split, step=state.step)),
            what=f"{split} of step {state.step}",
            deadline_s=parts.settings.rollout.deadline_s,
        )
        accuracy = headline(found)
        if accuracy is not None:
            results.setdefault(f"{split}_accuracy_first", accuracy)
            results[f"{split}_accuracy_last"] = accuracy
        if split == "validation":
            metrics |= found
        elif accuracy is not None:
            metrics["test/accuracy"] = accuracy
    if metrics:
        metrics["timing_s/testing"] = time.perf_counter() - started
    return replace(state, results=results), metrics


async def evaluate_prompts(parts: Parts, prompts: PromptSet, *, key: EntryKey) -> dict[str, float]:
    """Greedy responses to prompts, as validation metrics; some are written to `generations/`."""

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
    write_generations(parts, groups, name=f"{key.kind}_step_{key.step}")
    return metrics


async def validation_metrics(
    settings: Settings, prompts: PromptSet, run: Run
) -> tuple[dict[str, float], Sequence[GroupResult]]:
    """Greedy responses to prompts: validation metrics, and the responses.

    Args:
        settings: Of the run.
        prompts: All of them, of which `validation_limit` may leave some.
        run: Gives one session of each prompt.
    """
    limit = settings.prompts.validation_limit
    chosen: Sequence[Prompt] = [prompts[index] for index in range(min(len(prompts), limit or len(prompts)))]
    sampling = SamplingParams(max_tokens=settings.rollout.max_response_tokens, temperature=0.0)
    groups = await run(chosen, sampling)
    rows = [(group, group.trajectories[0] if group.trajectories else None) for group in groups]
    components = sorted({key for _, row in rows if row is not None for key in row.reward_components})
    variables = {
        "reward": [np.nan if row is None or row.reward is None else row.reward for _, row in rows],
        **{key: [np.nan if row is None else row.reward_components.get(key, np.nan) for _, row in rows]
           for key in components},
    }  # fmt: skip
    responses = ValidationResponses(
        uids=[group.prompt.uid for group, _ in rows],
        sources=[group.prompt.data_source for group, _ in rows],
        variables=variables,
    )
    return summarize_validation(responses), groups


def write_generations(parts: Parts, groups: Sequence[GroupResult], *, name: str) -> None:
    """Write the first responses as JSON lines."""
    count = parts.settings.metrics.log_validation_generations
    if count < 1:
        return
    decode = parts.inputs.tokenizer.decode
    lines = []
    for group in groups[:count]:
        row = group.trajectories[0] if group.trajectories else None
        response = row.input_ids[row.num_prompt_tokens :] if row is not None else np.empty(0, dtype=np.int32)
        lines.append(
            {
                "prompt_uid": group.prompt.uid,
                "prompt": decode([group.prompt.input_ids])[0],
                "response": decode([response])[0],
                "ground_truth": group.prompt.ground_truth,
                "reward": row.reward if row is not None else None,
                "failure": group.failures[0] if group.failures else None,
            }
        )
    parts.folder.generations.mkdir(exist_ok=True)
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_durably(parts.folder.generations / f"{name}.jsonl", content.encode())
