"""Sends each replica the published weights."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace

import structlog

from rl_core.errors import DeadlineError, EngineDiedError, EngineError, WeightProofError, WeightsGoneError
from rl_core.weights import (
    PublishReport,
    prove,
)
from rl_rollout.engines.replicas.replica import FROM_DISK, Published, Receiver, Replica, Weights, without
from rl_rollout.engines.waiting import Changes

GONE = (WeightProofError, WeightsGoneError)
"""Errors of an engine that cannot load published weights: they no longer exist, or have another version."""
log = structlog.get_logger(__name__)

TICK_S = 0.02
WORST = ("probe_max_diff", "canary_max_diff", "update_s", "proof_s", "drain_s", "stall_s")
"""Fields of a publication's report that are combined by the worst replica."""
NEWS_DEADLINE_S = 600.0
"""Maximum seconds to wait for the next publication when an engine's weights no longer exist."""


class ReplicaWeights:
    """Sends replicas the published weights.

    Attributes:
        published: The weights that every replica must serve now: the last update, and adapters of other names.
        waiting: Replicas that need another publication because they could not get these weights, with the reason.
    """

    def __init__(self, changes: Changes, replicas: Sized) -> None:
        """Start with the initial weights published.

        Args:
            changes: Announces a publication, or that a replica has it or is idle.
            replicas: All replicas; errors name the one that failed if there are several.
        """
        self._replicas = replicas
        self.published: Weights = FROM_DISK
        self.waiting: dict[int, Exception] = {}
        self._num_waiting: Counter[int] = Counter()
        self._changes = changes

    @property
    def adapters(self) -> list[str]:
        """Names of the published adapters."""
        return [one.adapter for one in self.published if one.adapter is not None]

    @property
    def drain_deadline_s(self) -> float | None:
        """Maximum seconds for a replica to finish its requests before the last update; None continues them."""
        return self.published[-1].drain_deadline_s if self.published else None

    def withdraw(self, adapter: str) -> None:
        """Publish the same weights without an adapter."""
        self._set(without(self.published, adapter))

    @contextmanager
    def publishing(self, published: Published) -> Iterator[None]:
        """Publish these weights within the context; all weights replace every adapter.

        If an engine refuses them or fails the proof, they are not published.
        """
        before = self.published
        kept = () if published.adapter is None else without(without(before, None), published.adapter)
        self._set((*kept, published))
        try:
            yield
        except BaseException:
            self._set(before)
            raise

    def _set(self, published: Weights) -> None:
        self.published = published
        self.waiting.clear()
        self._changes.announce()

    async def wait_restarted(self, replica: Replica) -> None:
        """Wait while a replica restarts and gets the published weights.

        Raises:
            WeightProofError: It received other weights.
            WeightsGoneError: It could not get the weights.
        """
        while replica.is_coming_back:
            if replica.index in self.waiting:
                raise self.waiting[replica.index]
            await asyncio.sleep(TICK_S)

    async def deliver(
        self, replica: Replica, started: Receiver | None = None, *, waits: bool = True
    ) -> PublishReport | None:
        """Send a replica the published weights and prove them, if it serves others.

        They may no longer exist: a publication failed after some replicas had its weights, the learner died during it,
        or the file of the next version is already in their place.

        Args:
            replica: The replica.
            started: Its engine, if it was just started and has no requests. None waits for its restart or drains it.
            waits: Wait for the next publication if these weights no longer exist.

        Returns:
            The report of the last proof; None for the weights that engines load themselves.

        Raises:
            WeightProofError: It serves other weights.
            EngineDiedError: It died.
            DeadlineError: It did not end its requests in time, or no other weights were published.
        """
        while not replica.is_gone:
            published = self.published
            if replica.served == published and (started is not None or not replica.is_coming_back):
                break
            try:
                if started is None:
                    await self.wait_restarted(replica)
                    await self._update(replica)
                else:
                    await self._send(replica, started)
            except GONE as error:
                if not waits or not published:
                    raise
                await self._wait_for_news(replica, published, error)
        return replica.report

    # -- inside

    async def _update(self, replica: Replica) -> None:
        """Update a serving replica, after its requests if these must end first."""
        async with replica.updating:
            try:
                while replica.served != self.published and not replica.is_gone:
                    published, began_at = self.published, time.perf_counter()
                    await self._drain(replica, published)
                    if self.published != published:
                        continue
                    drained_at = time.perf_counter()
                    await self._send(replica, replica.engine)
                    if replica.report is not None and replica.is_draining:
                        replica.report = replace(
                            replica.report, drain_s=drained_at - began_at, stall_s=time.perf_counter() - drained_at
                        )
            finally:
                replica.is_draining = False
                self._changes.announce()

    async def _drain(self, replica: Replica, published: Weights) -> None:
        """Wait until a replica has finished its requests, or other weights are published; it gets no new ones."""
        deadline_s = self.drain_deadline_s
        replica.is_draining = deadline_s is not None
        if deadline_s is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                while replica.num_running and self.published == published:
                    await self._changes.next()
        except TimeoutError:
            raise DeadlineError(
                f"replica {replica.index} had not finished {replica.num_running} samples {deadline_s:g} s after new "
                "requests were held back, and was not updated. Raise the deadline, shorten responses, or publish "
                "without drain."
            ) from None

    async def _send(self, replica: Replica, receiver: Receiver) -> None:
        """Send a replica the updates that it lacks, and prove each; what it serves is unknown until then."""
        published = self.published
        if not published:
            raise WeightProofError(
                f"replica {replica.index} serves unproven weights, and no earlier ones were published. Publish again."
            )
        for one in published:
            if one not in replica.proven:
                await self._send_one(replica, receiver, one)
        replica.served = published
        self._changes.announce()

    async def _send_one(self, replica: Replica, receiver: Receiver, published: Published) -> None:
        update, incarnation, began_at = published.update, replica.incarnation, time.perf_counter()
        before, replica.served, replica.report = replica.served, None, None
        proven_before = replica.proven
        replica.proven = () if published.adapter is None else without(proven_before, published.adapter)
        try:
            replica.receipt = await receiver.update_weights(update)
        except EngineDiedError:
            raise
        except EngineError:  # refused: nothing changed
            replica.served, replica.proven = before, proven_before
            raise
        update_s = time.perf_counter() - began_at
        try:
            report = await prove(
                update,
                [replica.receipt],
                [receiver],
                canary=published.canary,
                tolerances=published.tolerances,
                update_s=update_s,
            )
        except WeightProofError as error:
            if published.adapter is not None and replica.proven:  # it continues to serve the others
                await receiver.drop_adapter(published.adapter)
                replica.served = replica.proven
            if len(self._replicas) == 1:
                raise
            raise WeightProofError(f"replica {replica.index}: {error}", tensor=error.tensor) from None
        if replica.incarnation != incarnation:
            raise EngineDiedError(f"replica {replica.index} restarted during the weight update.")
        replica.proven, replica.report = (*replica.proven, published), report

    async def _wait_for_news(self, replica: Replica, published: Weights, error: Exception) -> None:
        if self.published != published:
            return
        if replica.index not in self.waiting:
            log.warning("engine_waits_for_weights", replica=replica.index, error=str(error))
        self.waiting[replica.index] = error
        self._num_waiting[replica.index] += 1
        try:
            async with asyncio.timeout(NEWS_DEADLINE_S):
                while self.published == published:
                    await self._changes.next()
        except TimeoutError:
            raise DeadlineError(
                f"replica {replica.index} could not load the current weights: {error} No other weights were published "
                f"within {NEWS_DEADLINE_S:g} s."
            ) from None
        finally:
            self._num_waiting[replica.index] -= 1
            if not self._num_waiting[replica.index]:  # later callers may try again
                self.waiting.pop(replica.index, None)
                self._changes.announce()


def joined_report(reports: Sequence[PublishReport]) -> PublishReport:
    """Combine the replicas' reports of one publication."""
    scores = tuple(scores for report in reports for scores in report.canary_scores)
    worst = {name: max(getattr(report, name) for report in reports) for name in WORST}
    return replace(reports[0], canary_scores=scores, **worst)
