# ruff: noqa: S101 - part of a test suite
"""Short functions that call an engine, each in its own event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rl_core.data import IntArray
from rl_core.errors import EngineError
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine, SamplingParams

PROMPT = np.array([5, 9, 14, 3, 22], dtype=np.int32)


@contextmanager
def refuses(words: str) -> Iterator[None]:
    """Expect an EngineError whose message contains these words."""
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    assert isinstance(found, EngineError), f"expected an EngineError about {words!r}; found {found!r}"
    assert words in str(found)


def generate(engine: RolloutEngine, *, num_samples: int = 1, max_tokens: int = 8, **sampling: Any) -> list[Generation]:
    """Return responses to PROMPT, generated in a new event loop."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return asyncio.run(engine.generate(GenerateRequest(input_ids=PROMPT, sampling=params, num_samples=num_samples)))


def short_request(*, seed: int, prompt: IntArray = PROMPT) -> GenerateRequest:
    """Return a request for at most 8 tokens."""
    return GenerateRequest(input_ids=prompt, sampling=SamplingParams(max_tokens=8, seed=seed))


def long_request_of(engine: RolloutEngine, *, seed: int) -> GenerateRequest:
    """Return a request for as many tokens as fit, up to 256 with the prompt."""
    max_tokens = min(engine.traits.max_model_len, 256) - len(PROMPT)
    return GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=max_tokens, seed=seed))


def long_request(engine: RolloutEngine) -> GenerateRequest:
    """Return a request with a long response: at least 40 tokens, or three quarters of what fits."""
    for seed in range(100):
        request = long_request_of(engine, seed=seed)
        (sampling,) = request.samplings
        wanted = min(40, 3 * sampling.max_tokens // 4)
        if len(asyncio.run(engine.generate(request))[0].token_ids) >= wanted:
            return request
    raise AssertionError(f"no response of {wanted} tokens in 100 draws; use a model that ends its responses less often")


async def begin(engine: RolloutEngine, request: GenerateRequest) -> "asyncio.Future[list[Generation]]":
    """Start a request, and return when shorter requests that began later have ended: it has tokens but is not finished.

    There are several shorter requests, so that one also shares its replica if the engine has several.
    """
    running = asyncio.ensure_future(engine.generate(request))
    await asyncio.sleep(0)
    short = GenerateRequest(input_ids=PROMPT, sampling=SamplingParams(max_tokens=3, seed=1))
    await asyncio.gather(*(engine.generate(short) for _ in range(6)))
    return running


def joined(prompt: IntArray, sample: Generation) -> IntArray:
    """Concatenate prompt and response."""
    return np.concatenate([prompt, sample.token_ids]).astype(np.int32)
