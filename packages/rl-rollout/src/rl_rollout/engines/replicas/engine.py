"""Several equal engines as one. Requests are distributed, and those of a dead engine move to the others."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import structlog

from rl_core.data import ImageSpan, IntArray
from rl_core.errors import EngineDiedError, EngineError, NotReadyError
from rl_core.gpus import GpuUse, gpu_use_of
from rl_core.weights import (
    Canary,
    ProofTolerances,
    PublishReport,
    TokenScores,
    WeightReceipt,
    WeightUpdate,
    check_finite,
)
from rl_rollout.engines.process import EngineClient, ProcessEngine
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine
from rl_rollout.engines.replicas.replica import EngineLoad, Published, Replica
from rl_rollout.engines.replicas.replica_set import MAX_DEATHS, ReplicaSet, or_first_error
from rl_rollout.engines.replicas.weights import joined_report
from rl_rollout.engines.requests import aborted_generations, check_scoring, missing_adapter, only_given
from rl_rollout.engines.waiting import RoutedRequest, Turn

log = structlog.get_logger(__name__)

NO_PREFIX = np.zeros(0, dtype=np.int32)
"""Scoring computes the whole sequence, even if a replica has its prefix cached."""
DRAIN_DEADLINE_S = 3600.0
"""Maximum seconds for engines to finish their requests before new weights."""
REMOVE_DEADLINE_S = 600.0
"""Seconds that a removed replica may continue its requests before they move."""


class ReplicatedEngine:
    """A `RolloutEngine` over equal engines.

    Each request goes to one of them (see `Router`), and to another if that one dies. A restarted
    (`EnginePlacement.max_restarts`) or added replica gets the current weights with proof before it serves. A replica
    that missed an update does not serve.
    """

    def __init__(self, replicas: Sequence[RolloutEngine], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Join engines that are not started yet.

        Args:
            replicas: The engines.
            clock: Returns seconds, for `loads`.
        """
        if not replicas:
            raise NotReadyError("a replicated engine needs at least one engine; found none.")
        self._replicas = ReplicaSet(clock)
        self._weights = self._replicas.weights
        self._publishing = Turn()
        self._sleep_level: Literal[0, 1, 2] = 0
        for engine in replicas:
            self._enter(engine, is_joining=False)

    @property
    def traits(self) -> EngineTraits:
        """Traits of one engine, with the smallest limits of all."""
        traits = [replica.engine.traits for replica in self._replicas.members if not replica.is_joining]
        return replace(
            traits[0],
            name=traits[0].name if len(traits) == 1 else f"{len(traits)} x {traits[0].name}",
            max_model_len=min(one.max_model_len for one in traits),
            can_sleep=all(one.can_sleep for one in traits),
            max_top_k=min(one.max_top_k for one in traits),
            max_lora_rank=min(one.max_lora_rank for one in traits),
            max_adapters=min(one.max_adapters for one in traits),
        )

    @property
    def num_replicas(self) -> int:
        """Number of replicas, including those that are starting, leaving or dead."""
        return len(self._replicas.members)

    @property
    def num_serving(self) -> int:
        """Number of replicas that accept requests now."""
        return len(self._replicas.serving)

    @property
    def is_waiting_for_weights(self) -> bool:
        """True while a replica needs another publication because the weights that it missed no longer exist."""
        return bool(self._weights.waiting)

    def loads(self) -> list[EngineLoad]:
        """Return the load of each replica so far, without removed ones."""
        return [replica.load for replica in self._replicas.members]

    async def gpu_use(self) -> list[GpuUse]:
        """Return the use of each GPU of the running replicas since the last call, in their order; empty on CPUs."""
        uses = await asyncio.gather(*(gpu_use_of(replica.engine) for replica in self._replicas.running))
        return [use for of_replica in uses for use in of_replica]

    async def stacks(self, *, deadline_s: float) -> dict[int, str]:
        """Return the stacks of each replica's process, responding or not. Replicas in this process are omitted."""
        engines = {one.index: one.engine for one in self._replicas.members if isinstance(one.engine, ProcessEngine)}
        stacks = await asyncio.gather(*(engine.stacks(deadline_s=deadline_s) for engine in engines.values()))
        return dict(zip(engines, stacks, strict=True))

    async def start(self) -> None:
        """Start all replicas at once. If one fails, close all."""
        members = self._replicas.members
        try:
            or_first_error(await asyncio.gather(*(one.engine.start() for one in members), return_exceptions=True))
        except BaseException:
            await self.close()
            raise
        for replica in members:
            replica.begin()

    async def add(self, engine: RolloutEngine) -> int:
        """Start another replica, and send it the current weights with their proof. Then it serves.

        Args:
            engine: Equal to the others, and not started. Closed on failure.

        Returns:
            Its index, which is never reused.

        Raises:
            EngineError: It cannot start, or has another model.
            WeightProofError: It serves other weights than those it received.
            DeadlineError: The current weights no longer exist, and no others were published.
        """
        replica = self._enter(engine, is_joining=True)
        try:
            await engine.start()
            self._check_equal(engine.traits)
            await self._weights.deliver(replica, engine)
            await self._follow(engine)
        except BaseException:
            self._replicas.leave(replica)
            await engine.close()
            raise
        replica.begin()
        self._replicas.changes.announce()
        log.info("engine_added", replica=replica.index)
        return replica.index

    async def remove(self, index: int, *, deadline_s: float = REMOVE_DEADLINE_S) -> EngineLoad:
        """Drain a replica and close it.

        Args:
            index: Index from `add`. The first replicas are numbered from 0.
            deadline_s: Seconds after which its remaining requests restart on others, with the same seeds.

        Returns:
            Its final load.

        Raises:
            EngineError: The replica does not exist, is already being removed, or is the last one that serves.
        """
        replica = self._replicas.get(index)
        self._check_dispensable(replica)
        replica.is_leaving = True
        try:
            await self._emptied(replica, deadline_s)
        except BaseException:
            replica.is_leaving = False
            self._replicas.changes.announce()
            raise
        async with replica.updating:
            load = replica.load
            self._replicas.leave(replica)
            await replica.engine.close()
        log.info("engine_removed", replica=index)
        return load

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        routed = RoutedRequest(num_samples=request.num_samples, request_id=request.request_id)

        async def ask(replica: Replica) -> list[Generation]:
            generations = await replica.engine.generate(routed.noting_tokens(request))
            replica.num_tokens += sum(len(generation.token_ids) for generation in generations)
            return generations

        generations = await self._replicas.ask_one(ask, request.input_ids, routed=routed)
        return aborted_generations(request) if generations is None else generations

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        top_k: int = 0,
        with_experts: bool = False,
        images: Sequence[tuple[ImageSpan, ...]] = (),
        adapter: str | None = None,
    ) -> list[TokenScores]:
        """See `RolloutEngine.score`. Spreads the sequences over the replicas by load alone."""
        check_scoring(sequences, top_k, self.traits, images, adapter)

        async def score_one(sequence: IntArray, more: Mapping[str, Any]) -> TokenScores:
            scores = await self._replicas.ask_one(
                lambda replica: replica.engine.score([sequence], top_k=top_k, with_experts=with_experts, **more),
                NO_PREFIX,
                routed=RoutedRequest(num_samples=1),
            )
            if scores is None:
                raise EngineError("the request was aborted before an engine started it.")
            return scores[0]

        spans_of_each = images or [()] * len(sequences)
        of_each = [only_given(images=[spans] if spans else (), adapter=adapter) for spans in spans_of_each]
        return list(await asyncio.gather(*map(score_one, sequences, of_each)))

    async def publish(
        self,
        update: WeightUpdate,
        *,
        canary: Canary,
        tolerances: ProofTolerances,
        drain: bool = False,
        drain_deadline_s: float = DRAIN_DEADLINE_S,
    ) -> PublishReport:
        """Send an update to every replica, and prove that each serves it. One that dies gets it after its restart.

        Args:
            update: The update to serve.
            canary: Sequences for the proof.
            tolerances: Tolerances of the proof.
            drain: Let running requests finish with the current weights, and hold back new ones meanwhile. Every
                response then has one policy version. Otherwise, requests continue with the new weights. Each replica
                drains separately; those that already have the update accept new requests.
            drain_deadline_s: Maximum seconds for running requests to end.

        Raises:
            WeightProofError: A replica serves different weights; the message names the first tensor that differs. Or
                the learner's own weights are not finite, and nothing is sent.
            EngineDiedError: No replica is left.
            DeadlineError: Requests did not end in time.
        """
        check_finite(update, canary)
        deadline_s = drain_deadline_s if drain else None
        published = Published(update=update, canary=canary, tolerances=tolerances, drain_deadline_s=deadline_s)
        report = joined_report(await self._publish(published))
        if report.canary_scores:
            logprobs = [scores.token_logprobs for scores in report.canary_scores[0]]
            published.canary = replace(canary, logprobs=logprobs)
        return report

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`. Returns a replica's receipt; all are checked.

        Raises:
            WeightProofError: As in `publish`.
        """
        published = Published(update=update)
        await self._publish(published)
        receipts = [
            one.receipt for one in self._replicas.members if published in (one.served or ()) and one.receipt is not None
        ]
        if not receipts:
            raise self._replicas.nobody_left()
        return receipts[0]

    async def drop_adapter(self, name: str) -> None:
        """See `RolloutEngine.drop_adapter`. Replicas that start later do not get it."""
        async with self._publishing:
            if name not in self._weights.adapters:
                raise missing_adapter(name, self._weights.adapters)
            holders = [one for one in self._replicas.members if one.withdraw(name)]
            self._weights.withdraw(name)
            running = set(self._replicas.running).intersection(holders)
            or_first_error(
                await asyncio.gather(*(one.engine.drop_adapter(name) for one in running), return_exceptions=True)
            )

    async def abort(self, request_ids: Collection[str] | None) -> None:
        """See `RolloutEngine.abort`."""
        self._replicas.abort(request_ids)
        await self._on_all(lambda engine: engine.abort(request_ids))

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `RolloutEngine.sleep`."""
        await self._on_all(lambda engine: engine.sleep(level))
        self._sleep_level = level

    async def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        await self._on_all(lambda engine: engine.wake())
        self._sleep_level = 0

    async def close(self) -> None:
        """See `RolloutEngine.close`. Raises the first error after all are closed."""
        self._replicas.close()
        members = self._replicas.members
        or_first_error(await asyncio.gather(*(one.engine.close() for one in members), return_exceptions=True))

    # -- inside

    def _enter(self, engine: RolloutEngine, *, is_joining: bool) -> Replica:
        replica = self._replicas.enter(engine, is_joining=is_joining)
        if isinstance(engine, ProcessEngine):
            engine.on_restart = partial(self._revive, replica)
        return replica

    def _check_equal(self, traits: EngineTraits) -> None:
        present = self.traits
        limits = [(one.max_model_len, one.max_lora_rank, one.max_adapters) for one in (present, traits)]
        if traits.vocab_size != present.vocab_size or any(has < wanted for wanted, has in zip(*limits, strict=True)):
            raise EngineError(
                f"a replica must be equal to the others: a vocabulary of {present.vocab_size} tokens, max_model_len "
                f"of at least {present.max_model_len}, max_lora_rank of at least {present.max_lora_rank} and "
                f"max_adapters of at least {present.max_adapters}; found {traits.vocab_size}, {traits.max_model_len}, "
                f"{traits.max_lora_rank} and {traits.max_adapters} in {traits.name}."
            )

    def _check_dispensable(self, replica: Replica) -> None:
        if replica.is_leaving or replica.is_joining:
            doing = "removed" if replica.is_leaving else "added"
            raise EngineError(f"replica {replica.index} is already being {doing}; wait until this is done.")
        others = [other for other in self._replicas.members if other is not replica]
        if any(other.is_staying for other in others):
            return
        if replica.is_staying or not any(other.is_coming_back or other.is_joining for other in others):
            raise EngineError(
                f"replica {replica.index} is the last of {self.num_replicas} that serves; add another one before you "
                "remove it, or close the whole engine."
            )

    @staticmethod
    async def _emptied(replica: Replica, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await replica.emptied()
        except TimeoutError:
            log.info("requests_move", replica=replica.index, num_requests=len(replica.requests))
            for routed in list(replica.requests):
                routed.stop()
            await replica.emptied()

    async def _on_all(self, ask: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        await self._replicas.ask_all(lambda replica: ask(replica.engine))

    async def _publish(self, published: Published) -> list[PublishReport]:
        """Deliver weights to every replica; those that die return no report."""

        async def deliver(replica: Replica) -> PublishReport | None:
            await self._weights.wait_restarted(replica)
            incarnation = replica.incarnation
            try:
                return await self._weights.deliver(replica, waits=False)
            except EngineDiedError as error:
                self._replicas.note_death(replica, error, incarnation)
                return None

        async with self._publishing:
            delivering: list[asyncio.Future[PublishReport | None]] = []
            try:
                with self._weights.publishing(published):
                    for _ in range(MAX_DEATHS):  # all may die meanwhile and restart
                        replicas = self._replicas.running or self._replicas.coming_back
                        delivering = [asyncio.ensure_future(deliver(replica)) for replica in replicas]
                        reports = [report for report in await asyncio.gather(*delivering) if report is not None]
                        if reports:
                            return reports
                    raise self._replicas.nobody_left()
            finally:
                if delivering:
                    await asyncio.wait(delivering)  # after a failure, others may still be loading

    async def _follow(self, engine: RolloutEngine | EngineClient) -> None:
        """Put a newly started engine to sleep if the others sleep."""
        level = 0
        while level != self._sleep_level:
            level = self._sleep_level
            await (engine.sleep(level) if level else engine.wake())

    async def _revive(self, replica: Replica, engine: EngineClient) -> None:
        replica.note_restart()
        await self._weights.deliver(replica, engine)
        await self._follow(engine)
        replica.num_restarts += 1
        log.info("engine_restarted", replica=replica.index)
