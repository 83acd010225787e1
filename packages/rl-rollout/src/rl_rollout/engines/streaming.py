"""Streams tokens as they are sampled."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np

from rl_rollout.engines.protocol import GenerateRequest, Generation, NewTokens, RolloutEngine

ARRAYS = ("token_ids", "logprobs", "policy_versions")
"""Fields with an element for each token."""


async def stream(engine: RolloutEngine, request: GenerateRequest) -> AsyncGenerator[NewTokens, None]:
    """Generate, and yield each sample's tokens as they arrive. The last ones have `NewTokens.ended`.

    A slow consumer does not slow the engine: tokens not yet consumed are joined into one piece per sample. The request
    begins when the first piece is awaited. It is cancelled when the iterator is closed (`contextlib.aclosing`),
    dropped, or its task is cancelled.

    Raises:
        EngineError: See `generate`. Also raised if an engine dies after it returned tokens, because these cannot be
            retracted.
    """
    tokens = TokenStream(engine, request)
    try:
        while tokens.num_open:
            for piece in await tokens.next():
                yield piece
    finally:
        await tokens.close()


class TokenStream:
    """A running request and the tokens that its consumer has not read. One task reads at a time.

    Attributes:
        num_open: Samples whose last tokens were not returned yet.
    """

    def __init__(self, engine: RolloutEngine, request: GenerateRequest) -> None:
        """Start the request."""
        self.num_open = request.num_samples
        self._pieces: dict[int, list[NewTokens]] = {}
        self._num_taken = [0] * request.num_samples
        self._unended = set(range(request.num_samples))
        self._has_news = asyncio.Event()
        self._running = asyncio.ensure_future(engine.generate(replace(request, on_tokens=self._take)))
        self._running.add_done_callback(lambda _: self._has_news.set())

    async def next(self) -> list[NewTokens]:
        """Return the tokens since the last call, at least one piece, while samples are open.

        Raises:
            EngineError: See `generate`.
        """
        while not self._pieces:
            if self._running.done():
                self._take_rest(self._running.result())
                break
            self._has_news.clear()
            await self._has_news.wait()
        pieces, self._pieces = self._pieces, {}
        joined = [_joined(several) for several in pieces.values()]
        self.num_open -= sum(piece.ended is not None for piece in joined)
        return joined

    async def close(self) -> None:
        """Cancel the request if it still runs."""
        self._running.cancel()
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.exception()  # retrieves it, so that asyncio does not report it

    def _take(self, piece: NewTokens) -> None:
        self._pieces.setdefault(piece.sample_index, []).append(piece)
        self._num_taken[piece.sample_index] += len(piece.token_ids)
        if piece.ended is not None:
            self._unended.discard(piece.sample_index)
        self._has_news.set()

    def _take_rest(self, samples: Sequence[Generation]) -> None:
        """Add the tokens that the engine did not stream, such as those of a request aborted before its first token."""
        for index in sorted(self._unended):
            sample, rest = samples[index], slice(self._num_taken[index], None)
            arrays = {name: getattr(sample, name)[rest] for name in ARRAYS}
            self._take(NewTokens(sample_index=index, ended=sample, **arrays))


def _joined(pieces: Sequence[NewTokens]) -> NewTokens:
    if len(pieces) == 1:
        return pieces[0]
    return replace(pieces[-1], **{name: np.concatenate([getattr(one, name) for one in pieces]) for name in ARRAYS})
