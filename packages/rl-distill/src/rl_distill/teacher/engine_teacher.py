"""A teacher's replica on any engine that returns top-k logprobs, e.g. vLLM with prompt logprobs."""

from collections.abc import Sequence
from typing import Any, Protocol

from rl_core.data import IntArray
from rl_core.errors import TeacherError
from rl_core.gpus import GpuUse, gpu_use_of
from rl_core.weights import TokenScores
from rl_distill.teacher.protocol import TeacherTraits
from rl_distill.teacher.scores import TeacherRow, TeacherScores

AT_ONCE = 2
"""Concurrent calls to an engine, which keep it busy while results are transferred; the engine itself batches."""


class ScoringEngine(Protocol):
    """The methods of an engine that a teacher needs; `rl_rollout.engines` has implementations."""

    @property
    def traits(self) -> Any:
        """Traits of the engine: max_model_len, vocab_size, can_sleep and max_top_k."""
        ...

    async def start(self) -> None:
        """Load the model."""
        ...

    async def score(self, sequences: Sequence[IntArray], *, top_k: int) -> Sequence[TokenScores]:
        """Return the most likely tokens at each position of the sequences, the actual token first."""
        ...

    async def sleep(self) -> None:
        """Free memory."""
        ...

    async def wake(self) -> None:
        """Restore the freed memory."""
        ...

    async def close(self) -> None:
        """Stop the engine."""
        ...


class EngineReplica:
    """A `TeacherReplica` on an engine; supports no hidden states, and only temperature 1."""

    at_once = AT_ONCE

    def __init__(self, engine: ScoringEngine) -> None:
        """Wrap an engine that is not started and has no other user."""
        self._engine = engine
        self._is_asleep = False

    @property
    def traits(self) -> TeacherTraits:
        """See `TeacherReplica.traits`."""
        traits = self._engine.traits
        return TeacherTraits(vocab_size=traits.vocab_size, hidden_size=None, max_tokens=traits.max_model_len)

    @property
    def most_top_k(self) -> int:
        """See `TeacherReplica.most_top_k`."""
        return min(int(self._engine.traits.max_top_k), int(self._engine.traits.vocab_size))

    @property
    def can_sleep(self) -> bool:
        """See `TeacherReplica.can_sleep`."""
        return bool(self._engine.traits.can_sleep)

    async def start(self) -> None:
        """See `TeacherReplica.start`."""
        await self._engine.start()

    async def score(self, sequences: Sequence[TeacherRow], *, top_k: int, with_hidden: bool) -> list[TeacherScores]:
        """See `TeacherReplica.score`.

        Raises:
            TeacherError: Hidden states are requested.
        """
        if with_hidden:
            raise TeacherError('an engine returns no hidden states; use a teacher with engine = "megatron".')
        scores = await self._engine.score([row.input_ids for row in sequences], top_k=top_k)
        return [TeacherScores(logprobs=of_row.logprobs, token_ids=of_row.token_ids) for of_row in scores]

    async def gpu_use(self) -> list[GpuUse]:
        """See `TeacherReplica`."""
        return await gpu_use_of(self._engine)

    async def wake(self) -> None:
        """See `TeacherReplica.wake`."""
        if self._is_asleep:
            await self._engine.wake()
            self._is_asleep = False

    async def sleep(self) -> None:
        """See `TeacherReplica.sleep`."""
        await self._engine.sleep()
        self._is_asleep = True

    async def close(self) -> None:
        """See `TeacherReplica.close`."""
        await self._engine.close()
