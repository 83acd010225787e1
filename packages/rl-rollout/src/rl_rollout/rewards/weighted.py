"""Several rewards as one: their weighted sum, with every component kept."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import RolloutError
from rl_core.records import Json, Prompt
from rl_rollout.rewards.protocol import RewardInput, RewardResult
from rl_rollout.rewards.scorer import RewardScorer, Scored, marked


class RewardPartError(RolloutError):
    """One of several rewards failed; the message has its name and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPart:
    """One of several rewards, ready to be called.

    Attributes:
        name: What its components start with.
        weight: Its factor in the sum.
        scorer: Calls it, with limits and retries of its own; its own policy must not be "zero".
        on_failure: "fail" fails the whole reward; "zero" counts 0, with the component `name/reward_failed`.
    """

    name: str
    weight: float
    scorer: RewardScorer
    on_failure: Literal["fail", "zero"] = "fail"


class WeightedReward:
    """The sum of weight times reward over parts, which are asked at once.

    Each part's reward is the component `name`, its components are `name/component`, its extras are under its
    name. A part that fails, fails the whole with its name, unless its `on_failure` is "zero".
    """

    def __init__(self, parts: Sequence[ScoredPart]) -> None:
        """Join the parts.

        Args:
            parts: With different names.
        """
        self._parts = tuple(parts)

    async def __call__(self, given: RewardInput) -> RewardResult:
        """Score one response.

        Raises:
            RewardPartError: A part failed.
        """
        scored = await asyncio.gather(*(part.scorer.score([given]) for part in self._parts))
        total, components, extras = 0.0, dict[str, float](), dict[str, Json]()
        for part, (one,) in zip(self._parts, scored, strict=True):
            result = _result_of(part, one)
            total += part.weight * result.reward
            components[part.name] = result.reward
            components |= {f"{part.name}/{name}": value for name, value in result.components.items()}
            if result.extras:
                extras[part.name] = dict(result.extras)
        return RewardResult(reward=total, components=components, extras=extras)

    async def rehearse(self, prompt: Prompt) -> None:
        """Rehearse each part.

        Raises:
            SettingsError: A part fails.
        """
        for part in self._parts:
            await part.scorer.rehearse(prompt)

    def close(self) -> None:
        """Close the parts."""
        for part in self._parts:
            part.scorer.close()


def _result_of(part: ScoredPart, scored: Scored) -> RewardResult:
    if part.on_failure == "zero":
        scored = marked(scored)
    if scored.result is None:
        raise RewardPartError(f"part {part.name!r}: {scored.failure}")
    return scored.result
