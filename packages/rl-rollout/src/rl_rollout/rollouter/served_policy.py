"""The policy that engines serve: its version, and its scores of tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_core.data import NO_VERSION, IntArray
from rl_core.record_fields import record
from rl_core.weights import TokenScores
from rl_rollout.engines.protocol import RolloutEngine

TRIES = 3
"""Maximum number of retries when weights are replaced during scoring."""


@record
class PolicyScores:
    """A policy's scores of sequences.

    Attributes:
        version: Version of its weights.
        scores: One entry per sequence. Empty if scores are unavailable.
    """

    version: int
    scores: Sequence[TokenScores]


async def policy_scores(
    engine: RolloutEngine, sequences: Sequence[IntArray], top_k: int, *, version: int
) -> PolicyScores:
    """Score sequences with an engine, with as many top tokens as it supports, up to top_k.

    Args:
        engine: Serves the policy.
        sequences: [T] int32 each.
        top_k: Number of top tokens to request.
        version: Version of its weights.
    """
    top_k = min(top_k, engine.traits.max_top_k)
    scores = await engine.score(sequences, top_k=top_k) if top_k > 0 else ()
    return PolicyScores(version=version, scores=scores)


class ServedPolicy:
    """Tracks when the engines' weights are replaced.

    Attributes:
        version: Version that the engines serve; `NO_VERSION` before the first.
    """

    def __init__(self) -> None:
        """Start without a version."""
        self.version = NO_VERSION
        self._num_changes = 0
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    @property
    def settled_version(self) -> int | None:
        """The version that all engines serve; None during a weight update."""
        return self.version if self._is_settled.is_set() else None

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Mark the engines as switching to a version, one after the other, within the context."""
        self._is_settled.clear()
        self._num_changes += 1
        try:
            yield
            self.version = version
        finally:
            self._is_settled.set()

    async def scores(self, engine: RolloutEngine, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Score tokens with a single version.

        Returns no scores if the weights changed during every attempt, or if the engine supports none.
        """
        for _ in range(TRIES):
            await self._is_settled.wait()
            version, num_changes = self.version, self._num_changes
            found = await policy_scores(engine, sequences, top_k, version=version)
            if num_changes == self._num_changes:
                return found
        return PolicyScores(version=self.version, scores=())
