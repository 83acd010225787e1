"""Builds a scorer from options."""

from collections.abc import Mapping
from typing import Any

from rl_core.errors import SettingsError
from rl_rollout.rewards.options import FailurePolicy, RewardOptions
from rl_rollout.rewards.protocol import RewardFunction
from rl_rollout.rewards.registry import resolve_reward
from rl_rollout.rewards.scorer import RewardScorer
from rl_rollout.rewards.weighted import WeightedReward


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
