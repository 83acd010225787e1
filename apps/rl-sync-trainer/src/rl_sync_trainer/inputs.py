"""What a run reads before anything heavy starts: tokenizer, problems, reward."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import SettingsError
from rl_rollout.prompts import PromptOptions, PromptSet, PromptTokenizer, load_prompts
from rl_rollout.rewards import RewardFunction, RewardScorer, resolve_reward
from rl_sync_trainer.plan import PromptCounts
from rl_sync_trainer.settings import Settings

NO_TIMEOUT_S = 10.0**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Checked inputs of a run.

    Attributes:
        tokenizer: Of the policy.
        train: Training prompts.
        validation: Prompts evaluated during training, if any.
        test: Prompts evaluated at both ends, if any.
        reward: The reward function, tried on an empty response.
    """

    tokenizer: PromptTokenizer
    train: PromptSet
    validation: PromptSet | None
    test: PromptSet | None
    reward: RewardFunction

    @property
    def counts(self) -> PromptCounts:
        """How many problems there are."""
        return PromptCounts(
            train=len(self.train),
            validation=len(self.validation) if self.validation is not None else 0,
            test=len(self.test) if self.test is not None else 0,
        )


def read_inputs(settings: Settings) -> Inputs:
    """Read and check everything that is not a model.

    Raises:
        DataError: A file or a row cannot be used.
        SettingsError: Tokenizer or reward function cannot be used, or there are too few prompts.
    """
    tokenizer = PromptTokenizer.load(settings.policy.path, template_options=settings.prompts.template_options)
    options = PromptOptions(
        max_tokens=settings.prompts.max_tokens,
        overlong=settings.prompts.overlong,
        plain_prompts=settings.prompts.plain_prompts,
    )

    def load(path: Path | None) -> PromptSet | None:
        return None if path is None else load_prompts([path], tokenizer, options)

    reward = resolve_reward(settings.reward.function)
    train = load_prompts([settings.prompts.train], tokenizer, options)
    if len(train) < settings.rollout.prompts_per_step:
        raise SettingsError(
            f"rollout.prompts_per_step = {settings.rollout.prompts_per_step}, but {settings.prompts.train} gives "
            f"{len(train)} prompts, and a step takes each prompt at most once. Lower it, or give more prompts."
        )
    inputs = Inputs(
        tokenizer=tokenizer,
        train=train,
        validation=load(settings.prompts.validation),
        test=load(settings.prompts.test),
        reward=reward,
    )
    asyncio.run(make_scorer(settings, reward).rehearse(train[0]))
    return inputs


def make_scorer(settings: Settings, reward: RewardFunction) -> RewardScorer:
    """The scorer that the settings describe."""
    return RewardScorer(
        reward,
        timeout_s=settings.reward.timeout_s or NO_TIMEOUT_S,
        max_concurrency=settings.reward.max_concurrency,
    )
