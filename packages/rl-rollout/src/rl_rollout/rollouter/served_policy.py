"""The policy that engines serve: which version, and what that one thinks of tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_core.data import NO_VERSION, IntArray
from rl_core.record_fields import record
from rl_rollout.engines.protocol import RolloutEngine, TokenScores

TRIES = 3
"""How often tokens are scored again because the weights were replaced meanwhile."""


@record
class PolicyScores:
    """What a policy thinks of sequences.

    Attributes:
        version: Of its weights.
        scores: One a sequence; none at all where nobody can tell.
    """

    version: int
    scores: Sequence[TokenScores]


async def policy_scores(
    engine: RolloutEngine, sequences: Sequence[IntArray], top_k: int, *, version: int
) -> PolicyScores:
    """What an engine thinks of sequences, which gives as many likeliest tokens as it can, up to top_k.

    Args:
        engine: Serves the policy.
        sequences: [T] int32 each.
        top_k: Likeliest tokens to ask for.
        version: Of the weights that it serves.
    """
    top_k = min(top_k, engine.traits.max_top_k)
    scores = await engine.score_top_k(sequences, top_k=top_k) if top_k > 0 else ()
    return PolicyScores(version=version, scores=scores)


class ServedPolicy:
    """Knows when the engines' weights are replaced.

    Attributes:
        version: That the engines serve; `NO_VERSION` before the first.
    """

    def __init__(self) -> None:
        """Nothing is served yet."""
        self.version = NO_VERSION
        self._num_changes = 0
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    @property
    def settled_version(self) -> int | None:
        """The version that all engines serve; None while they take another one."""
        return self.version if self._is_settled.is_set() else None

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """While the engines take a version, one after the other."""
        self._is_settled.clear()
        self._num_changes += 1
        try:
            yield
            self.version = version
        finally:
            self._is_settled.set()

    async def scores(self, engine: RolloutEngine, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """What one version thinks of tokens; no scores where each try met new weights, or the engine gives none."""
        for _ in range(TRIES):
            await self._is_settled.wait()
            version, num_changes = self.version, self._num_changes
            found = await policy_scores(engine, sequences, top_k, version=version)
            if num_changes == self._num_changes:
                return found
        return PolicyScores(version=self.version, scores=())
