"""Answers as server-sent events."""

import json
from collections.abc import AsyncIterator

from rl_rollout.gateway.anthropic_messages import BlockEvents, Event, end_events, message_id, start_event
from rl_rollout.gateway.asks import Live
from rl_rollout.gateway.chat_completions import chunk, completion_id, last_chunks
from rl_rollout.gateway.refusals import RefusedError

PING_S = 10.0
"""Longest silence: proxies and clients give up on a stream that says nothing."""
Piece = tuple[int, str, str]
"""Choice, "reasoning" or "content", and what is new of it."""


async def chat_stream(live: Live, *, model: str, num_choices: int, with_usage: bool) -> AsyncIterator[str]:
    """Chat Completions' events of an answer under way."""
    name = completion_id(live.name)
    try:
        for index in range(num_choices):
            yield _data(chunk(name, model, index, {"role": "assistant", "content": ""}))
        async for piece in _pieces(live):
            if piece is None:
                yield ": ping\n\n"
                continue
            index, kind, delta = piece
            field = "content" if kind == "content" else "reasoning_content"
            yield _data(chunk(name, model, index, {field: delta}))
        answer = await live.answer
        for one in last_chunks(answer, name=name, model=model, with_usage=with_usage):
            yield _data(one)
        yield _data("[DONE]")
        answer.deliver()
    except RefusedError as error:
        yield _data(json.dumps(error.as_openai()))
    finally:
        live.answer.cancel()


async def messages_stream(live: Live, *, model: str) -> AsyncIterator[str]:
    """Messages' events of an answer under way."""
    blocks = BlockEvents()
    try:
        yield _event(start_event(message_id(live.name), model=model, num_prompt_tokens=live.num_prompt_tokens))
        async for piece in _pieces(live):
            if piece is None:
                yield _event(("ping", {"type": "ping"}))
                continue
            for event in blocks.text("text" if piece[1] == "content" else "thinking", piece[2]):
                yield _event(event)
        answer = await live.answer
        for event in end_events(answer, blocks):
            yield _event(event)
        answer.deliver()
    except RefusedError as error:
        yield _event(("error", error.as_anthropic()))
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


def _data(text: str) -> str:
    return f"data: {text}\n\n"


def _event(event: Event) -> str:
    return f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
