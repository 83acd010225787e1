"""Several equal engines as one: requests are spread, and what a dead engine owed goes to the others."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog

from rl_core.errors import EngineDiedError, NotReadyError, WeightProofError
from rl_core.publish import BFLOAT16_TOLERANCES, ProofTolerances, PublishReport, check_receipt, publish_weights
from rl_core.records import FloatArray, IntArray
from rl_core.weights import Canary, WeightReceipt, WeightReceiver, WeightUpdate
from rl_rollout.engines.process import EngineCalls, ProcessEngine
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest, Generation, RolloutEngine, TokenScores
from rl_rollout.engines.requests import check_sequence, check_top_k
from rl_rollout.engines.routing import Router

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
"""Engines that may die under one request before it is given up as the cause."""
NO_PREFIX = np.zeros(0, dtype=np.int32)
"""What is scored is computed whole, whoever has computed its beginning before."""
NEWS_DEADLINE_S = 600.0
"""Longest wait of a restarted engine, whose weights have just been replaced, for the next publication."""


async def publish_to(
    engine: RolloutEngine, update: WeightUpdate, *, canary: Canary, tolerances: ProofTolerances
) -> PublishReport:
    """Give an update to an engine, or to all replicas of one, and prove that each serves it.

    Raises:
        WeightProofError: An engine serves something else; the message names the first tensor that differs.
        EngineDiedError: None is left to take it.
    """
    publish = getattr(engine, "publish", None)
    if publish is not None:
        report: PublishReport = await publish(update, canary=canary, tolerances=tolerances)
        return report
    return await publish_weights(update, [engine], canary=canary, tolerances=tolerances)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """What every replica must serve."""

    update: WeightUpdate
    canary: Canary | None = None
    tolerances: ProofTolerances = BFLOAT16_TOLERANCES


class ReplicatedEngine:
    """A `RolloutEngine` over equal engines.

    A request goes to one of them (see `Router`), and to another when that one dies. A replica that is started again
    (`EngineHost.max_restarts`) gets the present weights with their proof before it serves; one that missed an update
    does not serve.
    """

    def __init__(self, replicas: Sequence[RolloutEngine]) -> None:
        """Join engines that are not started yet."""
        if not replicas:
            raise NotReadyError("a replicated engine needs at least one engine; found none.")
        self._replicas = list(replicas)
        self._router = Router(len(replicas))
        self._published: _Published | None = None
        self._served: list[_Published | None] = [None] * len(replicas)
        self._catching_up = [asyncio.Lock() for _ in replicas]
        self._failed: dict[int, EngineDiedError] = {}
        self._news = asyncio.Event()
        self._waiting: set[int] = set()
        self._is_paused = False
        for index, replica in enumerate(replicas):
            if isinstance(replica, ProcessEngine):
                replica.on_restart = self._reviver(index)

    @property
    def traits(self) -> EngineTraits:
        """Of one of them; the least of their limits."""
        traits = [replica.traits for replica in self._replicas]
        return replace(
            traits[0],
            name=traits[0].name if len(traits) == 1 else f"{len(traits)} x {traits[0].name}",
            max_model_len=min(found.max_model_len for found in traits),
            can_sleep=all(found.can_sleep for found in traits),
            max_top_k=min(found.max_top_k for found in traits),
        )

    @property
    def num_serving(self) -> int:
        """Replicas that take requests now."""
        return len(self._serving())

    @property
    def is_waiting_for_weights(self) -> bool:
        """True while a restarted replica needs a publication, because the weights that it missed are gone."""
        return bool(self._waiting)

    async def start(self) -> None:
        """Start all of them at once; where one cannot, none is left."""
        started = await asyncio.gather(*(replica.start() for replica in self._replicas), return_exceptions=True)
        errors = [error for error in started if isinstance(error, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        generations: list[Generation] = await self._anywhere(
            lambda replica: replica.generate(request), request.input_ids, num_samples=request.num_samples
        )
        return generations

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """See `RolloutEngine.score`."""
        if not sequences:
            return []
        scores: list[FloatArray] = await self._anywhere(
            lambda replica: replica.score(sequences), np.concatenate(list(sequences)), num_samples=len(sequences)
        )
        return scores

    async def score_top_k(self, sequences: Sequence[IntArray], *, top_k: int) -> list[TokenScores]:
        """See `RolloutEngine.score_top_k`; the sequences are spread over the replicas, by load alone."""
        check_top_k(top_k, self.traits)
        for sequence in sequences:
            check_sequence(sequence, self.traits)

        async def score_one(sequence: IntArray) -> TokenScores:
            (scores,) = await self._anywhere(
                lambda replica: replica.score_top_k([sequence], top_k=top_k), NO_PREFIX, num_samples=1
            )
            scored: TokenScores = scores
            return scored

        return list(await asyncio.gather(*map(score_one, sequences)))

    async def publish(self, update: WeightUpdate, *, canary: Canary, tolerances: ProofTolerances) -> PublishReport:
        """See `publish_to`; a replica that dies on the way gets the update when it is there again."""
        with self._publishing(_Published(update=update, canary=canary, tolerances=tolerances)):
            reports: list[PublishReport] = []
            for _ in range(MAX_ATTEMPTS):  # all may die on the way, and come back
                reports = reports or await self._publish_to_all()
            if not reports:
                raise self._nobody_left()
        return replace(
            reports[0],
            probe_max_diff=max(report.probe_max_diff for report in reports),
            canary_max_diff=max(report.canary_max_diff for report in reports),
            update_s=max(report.update_s for report in reports),
            proof_s=max(report.proof_s for report in reports),
        )

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See `RolloutEngine.update_weights`; the receipt is that of a replica that serves something else, if any."""
        with self._publishing(_Published(update=update)):
            receipts: dict[int, WeightReceipt] = await self._on_all(lambda replica: replica.update_weights(update))
            if not receipts:
                raise self._nobody_left()
            for index in receipts:
                self._served[index] = self._published
        return next((one for one in receipts.values() if not _is_right(update, one)), next(iter(receipts.values())))

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        await self._on_all(lambda replica: replica.abort(request_ids))

    async def abort_all(self) -> None:
        """See `RolloutEngine.abort_all`."""
        await self._on_all(lambda replica: replica.abort_all())

    async def pause(self) -> None:
        """See `RolloutEngine.pause`."""
        self._is_paused = True
        await self._on_all(lambda replica: replica.pause())

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._is_paused = False
        await self._on_all(lambda replica: replica.resume())

    async def reset_prefix_cache(self) -> None:
        """See `RolloutEngine.reset_prefix_cache`."""
        for index in range(len(self._replicas)):
            self._router.forget(index)
        await self._on_all(lambda replica: replica.reset_prefix_cache())

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        await self._on_all(lambda replica: replica.sleep())

    async def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        await self._on_all(lambda replica: replica.wake())

    async def close(self) -> None:
        """See `RolloutEngine.close`; the first error is raised when all are closed."""
        closed = await asyncio.gather(*(replica.close() for replica in self._replicas), return_exceptions=True)
        errors = [error for error in closed if isinstance(error, BaseException)]
        if errors:
            raise errors[0]

    # -- inside

    @contextmanager
    def _publishing(self, published: _Published) -> Iterator[None]:
        """From now on replicas must serve this; what an engine refuses, or does not prove, is not published."""
        before, self._published = self._published, published
        news, self._news = self._news, asyncio.Event()
        news.set()
        try:
            yield
        except BaseException:
            self._published = before
            raise

    async def _anywhere(
        self, ask: Callable[[RolloutEngine], Awaitable[Any]], input_ids: IntArray, *, num_samples: int
    ) -> Any:
        """Ask a replica, and another one when it dies."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            index = self._router.choose(input_ids, among=self._serving() or self._coming_back())
            with self._router.carrying(index, num_samples):
                try:
                    await self._catch_up(index)
                    return await ask(self._replicas[index])
                except EngineDiedError as error:
                    self._note_death(index, error)
                    if attempt == MAX_ATTEMPTS:
                        raise EngineDiedError(
                            f"{attempt} engines died under this request, which may be what ends them. The last: {error}"
                        ) from error
        raise self._nobody_left()

    def _serving(self) -> list[int]:
        """Replicas that answer now; those that are being started again do not."""
        return [index for index in range(len(self._replicas)) if self._state(index) == "serving"]

    def _coming_back(self) -> list[int]:
        """Replicas that will answer once they are there again.

        Raises:
            EngineDiedError: There is none.
        """
        found = [index for index in range(len(self._replicas)) if self._state(index) in ("starting", "restarting")]
        if not found:
            raise self._nobody_left()
        return found

    def _state(self, index: int) -> str:
        replica = self._replicas[index]
        if isinstance(replica, ProcessEngine):
            return replica.state
        return "dead" if index in self._failed else "serving"

    def _death_of(self, index: int) -> EngineDiedError | None:
        """Why a replica serves no more; one may die while nobody asks it anything."""
        replica = self._replicas[index]
        return self._failed.get(index) or (replica.death if isinstance(replica, ProcessEngine) else None)

    def _note_death(self, index: int, error: EngineDiedError) -> None:
        self._failed[index] = error
        self._served[index] = None
        self._router.forget(index)
        log.warning("engine_died", replica=index, state=self._state(index), error=str(error))

    def _nobody_left(self) -> EngineDiedError:
        deaths = [(index, self._death_of(index)) for index in range(len(self._replicas))]
        said = "; ".join(f"replica {index}: {death}" for index, death in deaths if death is not None)
        return EngineDiedError(f"none of {len(self._replicas)} engines serves any more. {said}")

    async def _on_all(self, ask: Callable[[RolloutEngine], Awaitable[Any]]) -> dict[int, Any]:
        """Ask every replica that serves; those that die have no answer.

        One that is started again is not waited for: it may itself wait for weights that the caller publishes next.
        """

        async def one(index: int) -> Any:
            if self._state(index) != "serving":  # it may have died since it was listed
                return None
            try:
                return index, await ask(self._replicas[index])
            except EngineDiedError as error:
                self._note_death(index, error)
                return None

        answers = await asyncio.gather(*(one(index) for index in self._serving()))
        return dict(answer for answer in answers if answer is not None)

    async def _publish_to_all(self) -> list[PublishReport]:
        async def one(index: int) -> PublishReport | None:
            try:
                async with self._catching_up[index]:
                    return await self._publish_to(index, self._replicas[index])
            except EngineDiedError as error:
                self._note_death(index, error)
                return None

        reports = await asyncio.gather(*(one(index) for index in self._serving() or self._coming_back()))
        return [report for report in reports if report is not None]

    async def _catch_up(self, index: int) -> None:
        """Bring a replica to the present weights, where it has missed them."""
        async with self._catching_up[index]:
            if self._served[index] is not self._published:
                await self._publish_to(index, self._replicas[index])

    async def _publish_to(self, index: int, replica: WeightReceiver) -> PublishReport | None:
        """Give the present weights to a replica, with their proof."""
        published = self._published
        if published is None:
            return None
        report = None
        try:
            if published.canary is None:
                receipt = await replica.update_weights(published.update)
                check_receipt(published.update, receipt, tolerances=published.tolerances)
            else:
                report = await publish_weights(
                    published.update, [replica], canary=published.canary, tolerances=published.tolerances
                )
        except WeightProofError as error:
            raise WeightProofError(f"replica {index}: {error}", tensor=error.tensor) from None
        self._served[index] = published
        return report

    def _reviver(self, index: int) -> Callable[[EngineCalls], Awaitable[None]]:
        async def revive(calls: EngineCalls) -> None:
            self._served[index] = None
            while self._served[index] is not self._published:
                news = self._news
                try:
                    await self._publish_to(index, calls)
                except WeightProofError as error:  # the file may be the next version's already
                    log.warning("restarted_engine_waits_for_weights", replica=index, error=str(error))
                    self._waiting.add(index)
                    try:
                        await asyncio.wait_for(news.wait(), NEWS_DEADLINE_S)
                    finally:
                        self._waiting.discard(index)
            if self._is_paused:
                await calls.pause()
            self._failed.pop(index, None)
            log.info("engine_restarted", replica=index)

        return revive


def _is_right(update: WeightUpdate, receipt: WeightReceipt) -> bool:
    try:
        check_receipt(update, receipt, tolerances=BFLOAT16_TOLERANCES)
    except WeightProofError:
        return False
    return True
