"""Streams tokens as they are sampled."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rl_core.errors import EngineError, RLError
from rl_rollout.engines.protocol import GenerateRequest, Generation, NewTokens, RolloutEngine


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
        self._num_given = [0] * request.num_samples
        self._untold = set(range(request.num_samples))
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
                self._take_rest()
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
        self._num_given[piece.sample_index] += len(piece.token_ids)
        if piece.ended is not None:
            self._untold.discard(piece.sample_index)
        self._has_news.set()

    def _take_rest(self) -> None:
        """Add the tokens that the engine did not stream, such as those of a request aborted before its first token."""
        samples = self._running.result()
        for index in sorted(self._untold):
            sample, begin = samples[index], self._num_given[index]
            rest = NewTokens(
                sample_index=index,
                token_ids=sample.token_ids[begin:],
                logprobs=sample.logprobs[begin:],
                policy_versions=sample.policy_versions[begin:],
                ended=sample,
            )
            self._take(rest)


class HostedStreams:
    """Streams of remote callers, who poll for tokens. Unread tokens wait here."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Start without streams."""
        self._engine = engine
        self._streams: dict[str, TokenStream] = {}

    async def begin(self, name: str, request: GenerateRequest) -> list[NewTokens]:
        """Start to generate under a name, and return the first tokens."""
        self._streams[name] = TokenStream(self._engine, request)
        return await self.more(name)

    async def more(self, name: str) -> list[NewTokens]:
        """Return the tokens since the last call.

        Raises:
            EngineError: See `generate`. Also raised if the stream belongs to an earlier engine.
        """
        tokens = self._streams.get(name)
        if tokens is None:
            raise EngineError("the engine restarted and lost its streams. Send the request again.")
        is_over = True
        try:
            pieces = await tokens.next()
            is_over = not tokens.num_open
        finally:
            if is_over:
                await self.drop(name)
        return pieces

    async def drop(self, name: str) -> None:
        """Cancel a stream that its caller no longer reads."""
        tokens = self._streams.pop(name, None)
        if tokens is not None:
            await tokens.close()


async def generate_streamed(
    call: Callable[..., Awaitable[Any]], request: GenerateRequest, on_tokens: Callable[[NewTokens], None]
) -> list[Generation]:
    """Generate on a remote engine that has `HostedStreams`.

    Args:
        call: Calls a remote method: `begin_stream`, `more_tokens` or `drop_stream`.
        request: The request.
        on_tokens: Receives the tokens on this side.
    """
    name, ended = uuid.uuid4().hex, dict[int, Generation]()
    try:
        pieces = await call("begin_stream", name, replace(request, on_tokens=None))
        while True:
            for piece in pieces:
                on_tokens(piece)
                if piece.ended is not None:
                    ended[piece.sample_index] = piece.ended
            if len(ended) == request.num_samples:
                return [ended[index] for index in range(request.num_samples)]
            pieces = await call("more_tokens", name)
    finally:
        if len(ended) < request.num_samples:  # the rest is not needed
            dropping = asyncio.ensure_future(_drop(call, name))
            _dropping.add(dropping)
            dropping.add_done_callback(_dropping.discard)


_dropping: set["asyncio.Future[None]"] = set()


async def _drop(call: Callable[..., Awaitable[Any]], name: str) -> None:
    with suppress(RLError):  # the engine may have died
        await call("drop_stream", name)


def _joined(pieces: Sequence[NewTokens]) -> NewTokens:
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        policy_versions=np.concatenate([piece.policy_versions for piece in pieces]),
    )
