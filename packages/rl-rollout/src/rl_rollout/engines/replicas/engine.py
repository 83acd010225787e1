"""Several equal engines as one. Requests are distributed, and those of a dead engine move to the others."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import structlog

from rl_core.data import IntArray
from rl_core.errors import EngineDiedError, EngineError, NotReadyError, WeightProofError
from rl_core.gpus import GpuUse, gpu_use_of
from rl_core.weights import (
    BFLOAT16_TOLERANCES,
    Canary,
    ProofTolerances,
    PublishReport,
    TokenScores,
    WeightReceipt,
    WeightUpdate,
    check_receipt,
)
from rl_rollout.engines.engine_load import EngineLoad
from rl_rollout.engines.gate import DRAIN_DEADLINE_S
from rl_rollout.engines.process import EngineCalls, ProcessEngine
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine
from rl_rollout.engines.publishing import publish_to
from rl_rollout.engines.replicas.replica import Published, Replica
from rl_rollout.engines.replicas.replica_set import MAX_DEATHS, ReplicaSet
from rl_rollout.engines.replicas.weights import joined_report
from rl_rollout.engines.requests import aborted_generations, check_sequence, check_top_k
from rl_rollout.engines.tickets import AbortedError, Ticket
from rl_rollout.engines.waiting import Turn

__all__ = ["ReplicatedEngine", "publish_to"]

log = structlog.get_logger(__name__)

NO_PREFIX = np.zeros(0, dtype=np.int32)
"""Scoring computes the whole sequence, even if a replica has its prefix cached."""
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
        self._bringing: list[asyncio.Future[PublishReport | None]] = []
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
            max_model_len=min(found.max_model_len for found in traits),
            can_sleep=all(found.can_sleep for found in traits),
            max_top_k=min(found.max_top_k for found in traits),
            max_lora_rank=min(found.max_lora_rank for found in traits),
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
        asked = await asyncio.gather(*(gpu_use_of(replica.engine) for replica in self._replicas.running))
        return [one for of_replica in asked for one in of_replica]

    async def stacks(self, *, deadline_s: float) -> dict[int, str]:
        """Return the stacks of each replica's process, responding or not. Replicas in this process are omitted."""
        return await self._replicas.stacks(deadline_s=deadline_s)

    async def start(self) -> None:
        """Start all replicas at once. If one fails, close all."""
        engines = [replica.engine for replica in self._replicas.members]
        started = await asyncio.gather(*(engine.start() for engine in engines), return_exceptions=True)
        errors = [error for error in started if isinstance(error, BaseException)]
        if errors:
            await self.close()
            raise errors[0]
        for replica in self._replicas.members:
            replica.meter.begin_life()

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
            await self._weights.bring_started(replica, engine)
            await self._follow(engine)
        except BaseException:
            self._replicas.leave(replica)
            await engine.close()
            raise
        replica.is_joining = False
        replica.meter.begin_life()
        self._replicas.changed()
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
            self._replicas.changed()
            raise
        async with replica.updating:
            load = replica.load
            self._replicas.leave(replica)
            await replica.engine.close()
        log.info("engine_removed", replica=index)
        return load

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        ticket = Ticket(num_samples=request.num_samples, request_id=request.request_id)

        async def ask(replica: Replica) -> list[Generation]:
            generations = await replica.engine.generate(ticket.noting(request))
            replica.meter.num_tokens += sum(len(one.token_ids) for one in generations)
            return generations

        try:
            generations: list[Generation] = await self._replicas.ask_one(ask, request.input_ids, ticket=ticket)
        except AbortedError:
            return aborted_generations(request)
        return generations

    async def score(
        self, sequences: Sequence[IntArray], *, top_k: int = 0, with_experts: bool = False
    ) -> list[TokenScores]:
        """See `RolloutEngine.score`. Spreads the sequences over the replicas by load alone."""
        check_top_k(top_k, self.traits)
        for sequence in sequences:
            check_sequence(sequence, self.traits)

        async def score_one(sequence: IntArray) -> TokenScores:
            scores: list[TokenScores] = await self._replicas.ask_one(
                lambda replica: replica.engine.score([sequence], top_k=top_k, with_experts=with_experts),
                NO_PREFIX,
                ticket=Ticket(num_samples=1),
            )
            return scores[0]

        return list(await asyncio.gather(*map(score_one, sequences)))

    async def publish(
        self,
        update: WeightUpdate,
        *,
        canary: Canary,
        tolerances: ProofTolerances,
        drain: bool = False,
        drain_deadline_s: float = DRAIN_DEADLINE_S,
    ) -> PublishReport:
        """See `publish_to`. A replica that dies meanwhile gets the update after its restart.

        Each replica drains separately. Replicas that already have the update accept new requests.
        """
        published = Published(
            update=update,
            canary=canary,
            tolerances=tolerances,
            drain_deadline_s=drain_deadline_s if drain else None,
        )
        async with self._publishing:
            try:
                with self._weights.publishing(published):
                    reports: list[PublishReport] = []
                    for _ in range(MAX_DEATHS):  # all may die meanwhile and restart
                        reports = reports or await self._publish_to_all()
                    if not reports:
                        raise self._replicas.nobody_left()
            finally:
                if self._bringing:
                    await asyncio.wait(self._bringing)  # after a failure, others may still be loading
        return joined_report(reports)

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`. Returns the receipt of a replica with other weights, if any."""
        published = Published(update=update)

        async def take(replica: Replica) -> WeightReceipt:
            async with replica.updating:
                receipt = await self._weights.take(replica, replica.engine, update)
                replica.served = published
            return receipt

        async with self._publishing:
            with self._weights.publishing(published):
                receipts: dict[int, WeightReceipt] = await self._replicas.ask_all(take)
                if not receipts:
                    raise self._replicas.nobody_left()
        return next((one for one in receipts.values() if not _is_right(update, one)), next(iter(receipts.values())))

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
        engines = [replica.engine for replica in self._replicas.members]
        closed = await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
        errors = [error for error in closed if isinstance(error, BaseException)]
        if errors:
            raise errors[0]

    # -- inside

    def _enter(self, engine: RolloutEngine, *, is_joining: bool) -> Replica:
        replica = self._replicas.enter(engine, is_joining=is_joining)
        if isinstance(engine, ProcessEngine):
            engine.on_restart = self._reviver(replica)
        return replica

    def _check_equal(self, traits: EngineTraits) -> None:
        present = self.traits
        limits = [(one.max_model_len, one.max_lora_rank) for one in (present, traits)]
        if traits.vocab_size != present.vocab_size or any(has < wanted for wanted, has in zip(*limits, strict=True)):
            raise EngineError(
                f"a replica must be equal to the others: a vocabulary of {present.vocab_size} tokens, max_model_len "
                f"of at least {present.max_model_len} and max_lora_rank of at least {present.max_lora_rank}; found "
                f"{traits.vocab_size}, {traits.max_model_len} and {traits.max_lora_rank} in {traits.name}."
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
            log.info("requests_move", replica=replica.index, num_requests=len(replica.tickets))
            for ticket in list(replica.tickets):
                ticket.stop()
            await replica.emptied()

    async def _on_all(self, ask: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        await self._replicas.ask_all(lambda replica: ask(replica.engine))

    async def _publish_to_all(self) -> list[PublishReport]:
        async def one(replica: Replica) -> PublishReport | None:
            await self._weights.restarted(replica)
            incarnation = replica.incarnation
            try:
                return await self._weights.bring(replica)
            except EngineDiedError as error:
                self._replicas.note_death(replica, error, incarnation)
                return None

        found = self._replicas.running or self._replicas.coming_back
        self._bringing = [asyncio.ensure_future(one(replica)) for replica in found]
        reports = await asyncio.gather(*self._bringing)
        return [report for report in reports if report is not None]

    async def _follow(self, engine: RolloutEngine | EngineCalls) -> None:
        """Put a newly started engine to sleep if the others sleep."""
        level = 0
        while level != self._sleep_level:
            level = self._sleep_level
            await (engine.sleep(level) if level else engine.wake())

    def _reviver(self, replica: Replica) -> Callable[[EngineCalls], Awaitable[None]]:
        async def revive(calls: EngineCalls) -> None:
            replica.begin_life()
            await self._weights.bring_started(replica, calls)
            await self._follow(calls)
            replica.meter.num_restarts += 1
            log.info("engine_restarted", replica=replica.index)

        return revive


def _is_right(update: WeightUpdate, receipt: WeightReceipt) -> bool:
    try:
        check_receipt(update, receipt, tolerances=BFLOAT16_TOLERANCES)
    except WeightProofError:
        return False
    return True
