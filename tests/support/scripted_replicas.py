"""Scripted engines behind a `ReplicatedEngine`: each response ends when the test ends it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.errors import EngineDiedError
from rl_core.weights.publish import ProofTolerances
from rl_core.weights.transports import TensorTransport
from rl_core.weights.update import Canary, WeightUpdate
from rl_rollout.engines.protocol import GenerateRequest, Generation, SamplingParams
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.scripted import ScriptedEngine

EXACT = ProofTolerances()


class Held:
    """An engine whose responses wait for `finish`; each is the engine's own token.

    Attributes:
        engine: The engine.
        has_died: Whether `die` was called.
    """

    def __init__(self, token: int, **options: Any) -> None:
        """Make an engine that responds with this token."""
        self.has_died = False
        self._token = token
        self._asked: list[asyncio.Future[Sequence[int]]] = []
        self.engine = ScriptedEngine(self._say, **options)

    @property
    def num_running(self) -> int:
        """Running responses."""
        return sum(not future.done() for future in self._asked)

    @property
    def num_asked(self) -> int:
        """Started responses."""
        return len(self._asked)

    def finish(self) -> None:
        """End all running responses."""
        for future in self._asked:
            if not future.done():
                future.set_result([self._token])

    def die(self) -> None:
        """Fail all running responses and all later requests."""
        self.has_died = True
        for future in self._asked:
            if not future.done():
                future.set_exception(EngineDiedError("the GPU fell off the bus."))

    def _say(self, _: GenerateRequest, __: int) -> Awaitable[Sequence[int]]:
        if self.has_died:
            raise EngineDiedError("the GPU fell off the bus.")
        future: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        return future


def a_request(seed: int = 0, *, num_samples: int = 1, request_id: str | None = None) -> GenerateRequest:
    """Return a different prompt for each seed."""
    return GenerateRequest(
        input_ids=np.array([seed + 1, 2, 3], np.int32),
        sampling=SamplingParams(max_tokens=4, seed=seed),
        num_samples=num_samples,
        request_id=request_id,
    )


def an_update(version: int) -> WeightUpdate:
    """Return one tensor filled with its version."""
    return TensorTransport().pack({"a.weight": torch.full((2, 2), float(version))}, version=version, tied={})


def a_canary() -> Canary:
    """Return a scripted engine's canary."""
    return Canary(sequences=[np.array([1, 2, 3], np.int32)], logprobs=[np.array([0, -1, -1], np.float32)])


def run_with(held: Sequence[Held], work: Callable[[ReplicatedEngine], Awaitable[Any]]) -> Any:
    """Run something with replicas of these engines, which are closed at the end."""

    async def go() -> Any:
        engine = ReplicatedEngine([one.engine for one in held])
        await engine.start()
        try:
            async with asyncio.timeout(20):
                return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(go())


def ask(engine: ReplicatedEngine, *seeds: int, **options: Any) -> "list[asyncio.Future[list[Generation]]]":
    """Start a request for each seed."""
    return [asyncio.ensure_future(engine.generate(a_request(seed, **options))) for seed in seeds]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Run the event loop until a condition holds.

    Raises:
        AssertionError: The condition does not hold in time.
    """
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"waited for {what} in vain.")
