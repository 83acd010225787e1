"""Publishes weights to engines of any kind, with proof, and optionally between whole responses."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from rl_core.errors import DeadlineError, EngineError
from rl_core.weights import Canary, ProofTolerances, PublishReport, WeightUpdate, publish_weights
from rl_rollout.engines.protocol import GenerateRequest, Generation, RolloutEngine
from rl_rollout.engines.requests import aborted_generations
from rl_rollout.engines.waiting import Changes, RoutedRequest, StoppedError, Turn

DRAIN_DEADLINE_S = 3600.0
"""Maximum seconds for engines to finish their requests."""


async def publish_to(
    engine: RolloutEngine,
    update: WeightUpdate,
    *,
    canary: Canary,
    tolerances: ProofTolerances,
    drain: bool = False,
    drain_deadline_s: float = DRAIN_DEADLINE_S,
) -> PublishReport:
    """Send an update to an engine, or to all replicas of one, and prove that each serves it.

    Args:
        engine: The engine.
        update: The update to serve.
        canary: Sequences for the proof.
        tolerances: Tolerances of the proof.
        drain: Let running requests finish with the current weights, and hold back new ones meanwhile. Every response
            then has one policy version. Otherwise, requests continue with the new weights.
        drain_deadline_s: Maximum seconds for running requests to end.

    Raises:
        WeightProofError: An engine serves different weights. The message names the first tensor that differs.
        EngineDiedError: No engine is left.
        EngineError: The engine cannot hold back requests, so it cannot drain.
        DeadlineError: Requests did not end in time.
    """
    publish = getattr(engine, "publish", None)
    if publish is not None:
        report: PublishReport = await publish(
            update, canary=canary, tolerances=tolerances, drain=drain, drain_deadline_s=drain_deadline_s
        )
        return report
    if not drain:
        return await publish_weights(update, [engine], canary=canary, tolerances=tolerances)
    gate = getattr(engine, "gate", None)
    if not isinstance(gate, Gate):
        raise EngineError(
            f"{engine.traits.name} cannot hold requests back. Wrap it in ReplicatedEngine([engine]), or publish "
            "without drain."
        )
    async with gate.drained(drain_deadline_s) as drain_s:
        report = await publish_weights(update, [engine], canary=canary, tolerances=tolerances)
    return replace(report, drain_s=drain_s, stall_s=report.update_s + report.proof_s)


class Gate:
    """Gate for the requests to one engine. It is open except while the engine drains."""

    def __init__(self) -> None:
        """Create an open gate."""
        self._is_open = True
        self._draining = Turn()
        self._num_inside = 0
        self._waiting: set[RoutedRequest] = set()
        self._changes = Changes()

    async def through(
        self, request: GenerateRequest, generate: Callable[[GenerateRequest], Awaitable[list[Generation]]]
    ) -> list[Generation]:
        """Wait until the gate is open, and pass. A request that is aborted while it waits returns no tokens."""
        if not self._is_open:
            routed = RoutedRequest(num_samples=request.num_samples, request_id=request.request_id)
            self._waiting.add(routed)
            try:
                async with routed.stoppable():
                    while not self._is_open:
                        await self._changes.next()
            except StoppedError:
                return aborted_generations(request)
            finally:
                self._waiting.discard(routed)
        self._num_inside += 1
        try:
            return await generate(request)
        finally:
            self._num_inside -= 1
            self._changes.announce()

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Stop these requests, or all, from waiting."""
        for routed in list(self._waiting):
            if request_ids is None or routed.request_id in request_ids:
                routed.abort()

    @asynccontextmanager
    async def drained(self, deadline_s: float) -> AsyncIterator[float]:
        """Close the gate, wait until the current requests have ended, and open it again on exit.

        Yields:
            Seconds until they had ended.

        Raises:
            DeadlineError: The requests did not end in time.
        """
        began_at = time.perf_counter()
        async with self._draining:
            self._is_open = False
            try:
                async with asyncio.timeout(deadline_s) as limit:
                    while self._num_inside:
                        await self._changes.next()
                    limit.reschedule(None)
                    yield time.perf_counter() - began_at
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineError(
                    f"{self._num_inside} requests were still running {deadline_s:g} s after new ones were held back. "
                    "Raise the deadline, shorten responses, or publish without drain."
                ) from None
            finally:
                self._is_open = True
                self._changes.announce()
