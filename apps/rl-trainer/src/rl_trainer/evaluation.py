"""Greedy responses to validation and test problems."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_core import Prompt
from rl_core.records import NO_VERSION
from rl_metrics.generations import GenerationSample, draw_generations
from rl_metrics.validation import ValidationResponses, summarize_validation
from rl_rollout.engines.protocol import SamplingParams
from rl_rollout.prompts import PromptSet, PromptTokenizer
from rl_rollout.rollout import GroupResult
from rl_trainer.settings import Settings

DRAW_SEED = 0

PREDICTION = "pred"
"""Extra of a reward that says what the response answers; verl's name."""

Run = Callable[[Sequence[Prompt], SamplingParams], Awaitable[Sequence[GroupResult]]]


async def validation_metrics(
    settings: Settings, prompts: PromptSet, run: Run
) -> tuple[dict[str, float], Sequence[GroupResult]]:
    """Greedy responses to prompts: validation metrics, and the responses.

    Args:
        settings: Of the run.
        prompts: All of them, of which `validation_limit` may leave some.
        run: Gives one session of each prompt.
    """
    groups = await run(chosen_problems(settings, prompts), greedy(settings))
    rows = [group.trajectories[0] if group.trajectories else None for group in groups]
    metrics = summarize_answers(
        [group.prompt for group in groups],
        [None if row is None else row.reward for row in rows],
        [{} if row is None else row.reward_components for row in rows],
        predictions=[None if row is None else prediction_in(row.extras) for row in rows],
    )
    return metrics, groups


def chosen_problems(settings: Settings, prompts: PromptSet) -> list[Prompt]:
    """The problems that are asked: all, or the first `prompts.validation_limit`."""
    limit = settings.prompts.validation_limit
    return [prompts[index] for index in range(min(len(prompts), limit or len(prompts)))]


def greedy(settings: Settings) -> SamplingParams:
    """How validation problems are answered."""
    return SamplingParams(max_tokens=settings.rollout.max_response_tokens, temperature=0.0)


def prediction_in(extras: Mapping[str, Any]) -> str | None:
    """What a response answers, for majority votes: text or a number that its reward gave as the extra "pred"."""
    found = extras.get(PREDICTION)
    return str(found) if isinstance(found, str | int | float) else None


def summarize_answers(
    prompts: Sequence[Prompt],
    rewards: Sequence[float | None],
    components: Sequence[Mapping[str, float]],
    *,
    predictions: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """Validation metrics of answers to problems.

    Args:
        prompts: The problem of each answer.
        rewards: Of the answers; None where there is none.
        components: Of the rewards, by name; what one lacks does not count.
        predictions: What each answers; None where that is not known.
    """
    names = sorted({name for found in components for name in found})
    variables = {"reward": [np.nan if reward is None else reward for reward in rewards]}
    variables |= {name: [found.get(name, np.nan) for found in components] for name in names}
    return summarize_validation(
        ValidationResponses(
            uids=[prompt.uid for prompt in prompts],
            sources=[prompt.data_source for prompt in prompts],
            variables=variables,
            predictions=predictions,
        )
    )


def with_accuracies(results: Mapping[str, float], accuracies: Mapping[str, float | None]) -> dict[str, float]:
    """Results with `{split}_accuracy_first` and `{split}_accuracy_last` of a validation.

    Args:
        results: Of the run so far.
        accuracies: By split; None where nothing was asked.
    """
    found = dict(results)
    for split, accuracy in accuracies.items():
        if accuracy is not None:
            found.setdefault(f"{split}_accuracy_first", accuracy)
            found[f"{split}_accuracy_last"] = accuracy
    return found


def generation_samples(
    groups: Sequence[GroupResult], tokenizer: PromptTokenizer, *, source: str
) -> list[GenerationSample]:
    """The first response to each problem, as people read it.

    Args:
        groups: One session or more of each problem.
        tokenizer: Of the policy.
        source: The process that gave them.
    """
    samples = []
    rows = [group.trajectories[0] if group.trajectories else None for group in groups]
    nothing = np.empty(0, dtype=np.int32)
    responses = [nothing if row is None else row.input_ids[row.num_prompt_tokens :] for row in rows]
    given = tokenizer.decode([group.prompt.input_ids for group in groups])  # at once: a call for each takes longer
    outputs = tokenizer.decode(responses)
    for group, row, prompt, output in zip(groups, rows, given, outputs, strict=True):
        truth = group.prompt.ground_truth
        versions = [] if row is None else row.policy_versions[row.policy_versions != NO_VERSION].tolist()
        samples.append(
            GenerationSample(
                prompt_uid=group.prompt.uid,
                input=prompt,
                output=output,
                score=math.nan if row is None or row.reward is None else row.reward,
                ground_truth=None if truth is None else str(truth),
                policy_version=(min(versions), max(versions)) if versions else (NO_VERSION, NO_VERSION),
                source=source,
                failure=group.failures[0] if group.failures else None,
                components={} if row is None else dict(row.reward_components),
            )
        )
    return samples


def draw_samples(
    settings: Settings, samples: Sequence[GenerationSample], *, batches: Sequence[int] | None = None
) -> list[GenerationSample]:
    """Those that trackers show: the same problems at each validation.

    Args:
        settings: Of the run.
        samples: Of a validation.
        batches: The batch of each sample, where there are several.
    """
    return draw_generations(samples, count=settings.metrics.log_val_generations, seed=DRAW_SEED, batches=batches)
