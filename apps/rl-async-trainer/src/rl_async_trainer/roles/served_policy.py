"""The policy that the engines serve: which version, and what that one thinks of tokens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rl_async_trainer.messages import ProbeOrder
from rl_core.data.records import NO_VERSION
from rl_rollout.engines.protocol import RolloutEngine
from rl_trainer.reporting.token_probes import PolicyScores, policy_scores

TRIES = 3
"""How often tokens are scored anew because the weights were replaced meanwhile."""


class ServedPolicy:
    """Knows when the engines' weights are replaced."""

    def __init__(self) -> None:
        """Nothing is served yet."""
        self._version = NO_VERSION
        self._num_changes = 0
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """While the engines take a version, one after the other."""
        self._is_settled.clear()
        self._num_changes += 1
        try:
            yield
            self._version = version
        finally:
            self._is_settled.set()

    async def scores(self, engine: RolloutEngine, order: ProbeOrder) -> PolicyScores:
        """What one version thinks of tokens; no scores where each try met new weights, or the engine gives none."""
        for _ in range(TRIES):
            await self._is_settled.wait()
            version, num_changes = self._version, self._num_changes
            found = await policy_scores(engine, order.sequences, order.top_k, version=version)
            if num_changes == self._num_changes:
                return found
        return PolicyScores(version=self._version, scores=())
