"""Answers as server-sent events, for all APIs."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from rl_rollout.gateway.agent_requests import AgentRequest, Answer, StreamedAnswer
from rl_rollout.gateway.refusals import RefusedError

PING_S = 10.0
"""Maximum silence in seconds before a ping: proxies and clients close silent streams."""
Piece = tuple[int, str, str]
"""Index of the choice, "reasoning" or "content", and new text."""
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


class WireApi(ABC):
    """A parsed request of an API, and the format of its answer. Events are complete server-sent events.

    By default, pings are comments and errors are data events, as in OpenAI's APIs.

    Attributes:
        ask: The request.
        ping: An event without content.
        names: The API's names of the fields that refusals call "messages", "prompt" and "stop", where they differ.
    """

    ask: AgentRequest
    ping = ": ping\n\n"
    names: Mapping[str, str] = {}

    @abstractmethod
    def whole(self, answer: Answer) -> str:
        """Return the answer as JSON."""

    @abstractmethod
    def begin(self, live: StreamedAnswer) -> Iterable[str]:
        """Yield the events at the start of a stream."""

    @abstractmethod
    def piece(self, index: int, kind: str, delta: str) -> Iterable[str]:
        """Yield the events for new "reasoning" or "content" of a choice."""

    @abstractmethod
    def end(self, answer: Answer) -> Iterable[str]:
        """Yield the events at the end of a stream."""

    def fail(self, error: RefusedError) -> str:
        """Return the event for an error."""
        return data(json.dumps(error.as_openai()))


def data(text: str) -> str:
    """Return an unnamed event. Characters that some clients take for the end of a line are escaped."""
    return f"data: {text if text.isascii() else text.translate(LINE_ENDS)}\n\n"


async def events(live: StreamedAnswer, api: WireApi, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    """Yield the events of an answer in progress; it counts as delivered unless the client has disconnected."""
    try:
        for event in api.begin(live):
            yield event
        async for piece in _pieces(live):
            for event in (api.ping,) if piece is None else api.piece(*piece):
                yield event
        answer = await live.answer
        for event in api.end(answer):
            yield event
        if not await is_gone():  # the server silently drops what it sends to a disconnected client
            answer.deliver()
    except RefusedError as error:
        yield api.fail(error)
    finally:
        live.answer.cancel()


async def _pieces(live: StreamedAnswer) -> AsyncIterator[Piece | None]:
    """Yield new pieces until each message is complete; yield None after PING_S without any."""
    while not live.answer.done():
        live.news.clear()
        for piece in live.take():
            yield piece
        if not await live.changes(within_s=PING_S):
            yield None
    for piece in live.take_rest(await live.answer):
        yield piece
