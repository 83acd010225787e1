"""Client of the gateway benchmark for every server: sessions in closed loops over Chat Completions."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from _gateway_workload import Workload, user_message, words

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Measurements of a client.

    Attributes:
        wall_s: Seconds from the first request to the last answer.
        num_tokens: Number of sampled tokens, from the servers' usage.
        turn_s: Seconds of each turn, by session.
    """

    wall_s: float
    num_tokens: int
    turn_s: Sequence[Sequence[float]]


class TalkFailedError(RuntimeError):
    """A server refused a request or did not answer."""


def talk(url: str, keys: Sequence[str], workload: Workload, *, seed: int) -> Round:
    """Run all sessions of a workload at once, one per key.

    Raises:
        TalkFailedError: The server failed.
    """
    try:
        return asyncio.run(_talk(url, keys, workload, seed))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TalkFailedError(f"{type(error).__name__}: {error}") from error


async def _talk(url: str, keys: Sequence[str], workload: Workload, seed: int) -> Round:
    known = words()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        texts = [np.random.default_rng((seed, index)) for index in range(len(keys))]
        started = time.perf_counter()
        runs = (_session(client, key, workload, random, known) for key, random in zip(keys, texts, strict=True))
        told = await asyncio.gather(*runs)
        wall_s = time.perf_counter() - started
    turn_s, num_tokens = zip(*told, strict=True)
    return Round(wall_s=wall_s, num_tokens=sum(num_tokens), turn_s=turn_s)


async def _session(
    client: aiohttp.ClientSession, key: str, workload: Workload, random: np.random.Generator, known: list[str]
) -> tuple[list[float], int]:
    """Run a conversation; return the time of each turn, and the number of tokens."""
    messages: list[dict[str, Any]] = []
    turn_s, num_tokens = [], 0
    body = {"model": "policy", "messages": messages, "max_tokens": workload.max_tokens, "temperature": 1.0}
    if workload.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    for _ in range(workload.num_turns):
        messages.append(user_message(random, known, workload.user_tokens))
        started = time.perf_counter()
        async with client.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as response:
            raw = await response.read()
        turn_s.append(time.perf_counter() - started)
        if response.status != 200:
            raise TalkFailedError(f"it answered {response.status}: {raw[:500]!r}")
        content, sampled = _streamed(raw) if workload.is_streamed else _whole(raw)
        num_tokens += sampled
        messages.append({"role": "assistant", "content": content})
    return turn_s, num_tokens


def _whole(raw: bytes) -> tuple[str, int]:
    """Return the text of an answer and its number of tokens."""
    answer = json.loads(raw)
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def _streamed(raw: bytes) -> tuple[str, int]:
    """Like `_whole`, from the events of a streamed answer."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    return "".join(delta.get("content") or "" for delta in deltas), chunks[-1]["usage"]["completion_tokens"]
