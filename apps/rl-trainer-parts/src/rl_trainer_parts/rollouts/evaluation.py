"""Validation and test: which prompts, how they are sampled, and the metrics."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from rl_core import Prompt
from rl_metrics.run_files import GenerationSample, draw_places
from rl_metrics.validation import ValidationResponses, headline, headline_name, summarize_validation
from rl_rollout import GroupResult, Rollout
from rl_rollout.engines import SamplingParams
from rl_rollout.prompts import PromptSet, PromptTokenizer
from rl_trainer_parts.rollouts.answers import Answer, answers_of, first_answers, generation_samples
from rl_trainer_parts.rollouts.engines import make_engine, start_within
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.rollouts.setup import open_rollout
from rl_trainer_parts.settings.schema import Settings

ZERO_OR_ONE = ("choice", "exact_match", "number_match", "math_verify")
"""Built-in rewards whose mean is an accuracy."""

TESTING = "timing_s/testing"

DRAW_SEED = 0
"""Seed of the prompts shown; the same at every step."""


def chosen_problems(settings: Settings, prompts: PromptSet) -> list[Prompt]:
    """The prompts to evaluate: all, or the first `prompts.validation_limit`."""
    count = min(len(prompts), settings.prompts.validation_limit or len(prompts))
    return [prompts[index] for index in range(count)]


def validation_sampling(settings: Settings) -> SamplingParams:
    """Sampling parameters of validation and test."""
    return SamplingParams(
        max_tokens=settings.rollout.max_response_tokens, temperature=settings.prompts.validation_temperature
    )


async def answer_problems(settings: Settings, rollout: Rollout, problems: Sequence[Prompt]) -> list[GroupResult]:
    """`prompts.validation_samples` sessions per prompt.

    Sampling seeds depend only on the run's seed and the prompt's uid. They are the same at every validation and for
    every engine, so a curve shows the policy and not the random draws.
    """
    return await rollout.run(
        problems,
        num_sessions=settings.prompts.validation_samples,
        sampling=validation_sampling(settings),
        seed=settings.run.seed,
    )


def summarize_answers(answers: Sequence[Answer]) -> dict[str, float]:
    """Validation metrics of one or more answers per prompt."""
    return summarize_validation(validation_responses(answers))


def validation_responses(answers: Sequence[Answer], *, source: str | None = None) -> ValidationResponses:
    """The answers as columns.

    Args:
        answers: One or more per prompt; an answer without a component is left out of that component. A component
            `reward` is the variable `reward/reward`, because the variable `reward` is the whole reward.
        source: Name of the source of all; None takes each prompt's own.
    """
    names = sorted({name for answer in answers for name in answer.components})
    variables = {"reward": [answer.reward for answer in answers]}
    for name in names:
        values = [answer.components.get(name, float("nan")) for answer in answers]
        variables["reward/reward" if name == "reward" else name] = values
    return ValidationResponses(
        uids=[answer.prompt.uid for answer in answers],
        sources=[source or answer.prompt.data_source for answer in answers],
        variables=variables,
        predictions=[answer.prediction for answer in answers],
    )


def measured(settings: Settings, metrics: Mapping[str, float]) -> dict[str, float]:
    """The headline of a split's metrics under the name of what it measures; empty without one.

    The name is "accuracy" for the component `acc`, and for a reward that is 0 or 1 by definition.
    """
    value, name = headline(metrics), headline_name(metrics)
    if name == "mean_reward" and settings.reward.function in ZERO_OR_ONE:
        name = "accuracy"
    return {} if value is None else {name: value}


def with_results(settings: Settings, results: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Results with entries such as `validation_accuracy_first` and `test_mean_reward_last` updated.

    Args:
        settings: The run's settings.
        results: Results of the run so far.
        metrics: Metrics of a validation, and of the test as in `test/accuracy`.
    """
    updated = dict(results)
    headlines = {f"validation_{name}": value for name, value in measured(settings, metrics).items()}
    headlines |= {name.replace("/", "_"): value for name, value in metrics.items() if name.startswith("test/")}
    for name, value in headlines.items():
        updated.setdefault(f"{name}_first", value)
        updated[f"{name}_last"] = value
    return updated


async def measure_splits(
    settings: Settings,
    inputs: Inputs,
    splits: Sequence[str],
    measure: Callable[[str, list[Prompt]], Awaitable[Mapping[str, float]]],
) -> dict[str, float]:
    """Metrics of those splits, "validation" or "test", that a run has; empty without one.

    Args:
        settings: The run's settings.
        inputs: Its prompts.
        splits: Names of the splits.
        measure: Returns the metrics of a split's problems. Of the test, only the headline counts: `test/accuracy`.
    """
    started = time.perf_counter()
    metrics: dict[str, float] = {}
    for split in splits:
        prompts = {"validation": inputs.validation, "test": inputs.test}[split]
        if prompts is not None:
            found = await measure(split, chosen_problems(settings, prompts))
            if split == "test":
                found = {f"test/{name}": value for name, value in measured(settings, found).items()}
            metrics |= found
    return metrics | {TESTING: time.perf_counter() - started} if metrics else {}


def draw_samples(
    settings: Settings,
    answers: Iterable[Answer],
    tokenizer: PromptTokenizer,
    *,
    batches: Mapping[str, int] | None = None,
) -> list[GenerationSample]:
    """A validation's samples for trackers: first answers to the same prompts each time.

    Args:
        settings: The run's settings.
        answers: The validation's answers, in any order.
        tokenizer: The policy's tokenizer; only shown samples are decoded.
        batches: The batch of each prompt by uid, if there are several.
    """
    first = sorted(first_answers(answers), key=lambda answer: answer.prompt.uid)
    places = draw_places(
        [0 if batches is None else batches[answer.prompt.uid] for answer in first],
        count=settings.metrics.log_val_generations,
        seed=DRAW_SEED,
    )
    samples = generation_samples([first[place] for place in places], tokenizer)
    return sorted(samples, key=lambda sample: (sample.input, sample.prompt_uid))


async def validate_policy(settings: Settings, inputs: Inputs) -> dict[str, list[Answer]]:
    """Answer all prompts to evaluate, by name, with a policy and the adapter of `lora.path`; the engine starts once."""
    with ExitStack() as opened:
        policy = settings.policy.path
        if settings.lora.rank and settings.lora.path is not None:
            from rl_distill.checkpoints.merged_folder import merged_policy  # imports torch

            policy = opened.enter_context(merged_policy(settings.lora.path, base=policy))
        engine = make_engine(settings, policy, serves_adapter=False)
        try:
            await start_within(engine, settings)
            with open_rollout(settings, inputs.tokenizer, engine) as rollout:
                found = {}
                for name, prompts in inputs.evaluated.items():
                    groups = await answer_problems(settings, rollout, chosen_problems(settings, prompts))
                    found[name] = answers_of(groups, source="validate")
                return found
        finally:
            await engine.close()
