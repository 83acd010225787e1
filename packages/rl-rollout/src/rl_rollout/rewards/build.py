"""Builds a scorer from options, of one reward or of a weighted sum of several."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.data import Json, Prompt
from rl_core.errors import RolloutError, SettingsError
from rl_rollout.rewards.options import FailurePolicy, RewardOptions, RewardPart
from rl_rollout.rewards.protocol import RewardFunction, RewardInput, RewardResult
from rl_rollout.rewards.registry import resolve_reward
from rl_rollout.rewards.scorer import RewardScorer, Scored, marked


def build_scorer(options: RewardOptions, *, parts: Mapping[str, Any] | None = None) -> RewardScorer:
    """Build the scorer that the options describe.

    Args:
        options: Options of the reward; they are checked here.
        parts: Objects that settings cannot express, such as {"model": JudgeModel(...)} for `judge`; see
            `resolve_reward`.

    Raises:
        SettingsError: An option, a name or a file is invalid.
        MissingExtraError: A reward needs a library that is not installed.
    """
    options.check()
    if not options.parts:
        return _scorer(options, resolve_reward(options.function, options.options, parts=parts))
    scored = []
    for number, part in enumerate(options.parts):
        try:
            function = resolve_reward(part.function, part.options, parts=parts)
        except SettingsError as error:
            raise SettingsError(f"parts[{number}]: {error}") from error
        scorer = _scorer(options.of_part(part), function)
        scored.append((part, scorer))
    # Each part has its own limits and retries. The sum only decides whether a failed session gets a reward of 0.
    policy = FailurePolicy(on_failure="zero" if options.on_failure == "zero" else "drop", retries=0)
    return RewardScorer(WeightedReward(scored), timeout_s=None, max_concurrency=1_000_000, failures=policy)


def _scorer(options: RewardOptions, function: RewardFunction) -> RewardScorer:
    return RewardScorer(
        function,
        timeout_s=options.timeout_s,
        max_concurrency=options.max_concurrency,
        max_calls_per_s=options.max_calls_per_s,
        failures=options.failures,
    )


ACCURACY = "acc"
"""Component that validation takes as its main metric."""


class WeightedReward:
    """The weighted sum of several rewards, computed concurrently.

    Each part's reward is the component `name`, its components are `name/component`, and its extras are under its name.
    The first part with a component `acc` also gives it to the whole, because `acc` is the main metric of validation.
    A failed part fails the whole reward, unless its `on_failure` is "zero".
    """

    def __init__(self, parts: Sequence[tuple[RewardPart, RewardScorer]]) -> None:
        """Store the parts.

        Args:
            parts: Parts with different names. The scorer applies each part's own limits and retries. A part's own
                policy must not be "zero".

        Raises:
            SettingsError: There are no parts, or two have the same name.
        """
        names = [part.label for part, _ in parts]
        if not names or len({*names}) < len(names):
            raise SettingsError(f"a weighted reward needs at least one part, with different names; found {names}.")
        self._parts = tuple(parts)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            RolloutError: A part failed.
        """
        scored = await self.score_one(given)
        if scored.result is None:
            raise RolloutError(scored.failure)
        return scored.result

    async def score_one(self, given: RewardInput) -> Scored:
        """Score one response. `RewardScorer` calls this instead of `__call__`, so that times exclude waits."""
        batches = await asyncio.gather(*(scorer.score([given]) for _, scorer in self._parts))
        scored = [
            marked(outcome) if part.on_failure == "zero" else outcome
            for (part, _), (outcome,) in zip(self._parts, batches, strict=True)
        ]
        reward_s = max(outcome.reward_s for outcome in scored)
        num_attempts = max(outcome.num_attempts for outcome in scored)
        total, components, extras = 0.0, dict[str, float](), dict[str, Json]()
        for (part, _), outcome in zip(self._parts, scored, strict=True):
            if outcome.result is None:
                failure = f"part {part.label!r} of the reward: {outcome.failure}"
                return Scored(failure=failure, reward_s=reward_s, num_attempts=num_attempts)
            total += part.weight * outcome.result.reward
            components[part.label] = outcome.result.reward
            components |= {f"{part.label}/{name}": value for name, value in outcome.result.components.items()}
            if outcome.result.extras:
                extras[part.label] = dict(outcome.result.extras)
            if ACCURACY in outcome.result.components:
                components.setdefault(ACCURACY, outcome.result.components[ACCURACY])
        result = RewardResult(reward=total, components=components, extras=extras)
        return Scored(result=result, reward_s=reward_s, num_attempts=num_attempts)

    async def rehearse(self, prompt: Prompt) -> None:
        """Rehearse each part.

        Raises:
            SettingsError: A part fails.
        """
        for _, scorer in self._parts:
            await scorer.rehearse(prompt)

    def close(self) -> None:
        """Close the parts."""
        for _, scorer in self._parts:
            scorer.close()
