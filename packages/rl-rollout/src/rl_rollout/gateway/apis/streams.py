"""Answers as server-sent events, for all APIs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

from rl_rollout.gateway.asks import Answer, Ask, Live
from rl_rollout.gateway.refusals import RefusedError

PING_S = 10.0
"""Longest silence: proxies and clients give up on a stream that says nothing."""
Piece = tuple[int, str, str]
"""Choice, "reasoning" or "content", and what is new of it."""


class WireApi(Protocol):
    """One request of an API, read, and how it is answered; events are complete, as they are sent.

    Attributes:
        ask: What it asks for.
        ping: An event that says nothing.
    """

    ask: Ask
    ping: str

    def whole(self, answer: Answer) -> str:
        """The answer as JSON."""
        ...

    def begin(self, live: Live) -> Iterable[str]:
        """The events that begin a stream."""
        ...

    def piece(self, index: int, kind: str, delta: str) -> Iterable[str]:
        """The events of more "reasoning" or "content" of a choice."""
        ...

    def end(self, answer: Answer) -> Iterable[str]:
        """The events that end a stream."""
        ...

    def fail(self, error: RefusedError) -> str:
        """The event of a failure."""
        ...


async def events(live: Live, api: WireApi, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    """The events of an answer under way, which counts as delivered unless its client is gone at the end."""
    try:
        for event in api.begin(live):
            yield event
        async for piece in _pieces(live):
            for event in (api.ping,) if piece is None else api.piece(*piece):
                yield event
        answer = await live.answer
        for event in api.end(answer):
            yield event
        if not await is_gone():  # to whom the server sends nothing, and says nothing of it
            answer.deliver()
    except RefusedError as error:
        yield api.fail(error)
    finally:
        live.answer.cancel()


async def _pieces(live: Live) -> AsyncIterator[Piece | None]:
    """What is new, as it comes, up to the whole of each message; None where nothing came for a while."""
    while not live.answer.done():
        live.news.clear()
        for piece in live.take():
            yield piece
        if not await live.changes(within_s=PING_S):
            yield None
    for piece in live.take_rest(await live.answer):
        yield piece
