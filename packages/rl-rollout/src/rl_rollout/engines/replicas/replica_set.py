"""The current replicas, and the choice of the replica that answers a request when others die or leave."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import structlog

from rl_core.data import IntArray
from rl_core.errors import EngineDiedError, EngineError, NotReadyError
from rl_rollout.engines.engine_load import LoadMeter
from rl_rollout.engines.process import ProcessEngine
from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.replicas.replica import Replica
from rl_rollout.engines.replicas.routing import Router
from rl_rollout.engines.replicas.weights import ReplicaWeights
from rl_rollout.engines.tickets import AbortedError, StoppedError, Ticket
from rl_rollout.engines.waiting import Changes

log = structlog.get_logger(__name__)

MAX_DEATHS = 3
"""Maximum number of engines that may die under one request before the request is refused as the cause."""


class ReplicaSet:
    """Replicas by index, and the requests in progress.

    Attributes:
        weights: The weights that all of them must serve.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without replicas.

        Args:
            clock: Returns seconds, for the replicas' loads.
        """
        self._clock = clock
        self._members: dict[int, Replica] = {}
        self._router = Router(0)
        self._changes = Changes()
        self._tickets: set[Ticket] = set()
        self._is_closed = False
        self.weights = ReplicaWeights(self._changes)

    def enter(self, engine: RolloutEngine, *, is_joining: bool) -> Replica:
        """Add a replica.

        Raises:
            NotReadyError: The set is closed.
        """
        self._require_open()
        meter = LoadMeter(self._clock)
        replica = Replica(self._router.add(), engine, meter=meter, changes=self._changes, is_joining=is_joining)
        self._members[replica.index] = replica
        return replica

    async def stacks(self, *, deadline_s: float) -> dict[int, str]:
        """See `ReplicatedEngine.stacks`."""
        asked = {index: one.engine for index, one in self._members.items() if isinstance(one.engine, ProcessEngine)}
        found = await asyncio.gather(*(engine.stacks(deadline_s=deadline_s) for engine in asked.values()))
        return dict(zip(asked, found, strict=True))

    def leave(self, replica: Replica) -> None:
        """Remove a replica."""
        replica.is_gone = True
        del self._members[replica.index]
        self._router.forget(replica.index)
        self._changes.announce()

    def close(self) -> None:
        """Close the set. Requests stop waiting."""
        self._is_closed = True
        self._changes.announce()

    def changed(self) -> None:
        """Record that a replica starts or stops accepting requests."""
        self._changes.announce()

    def get(self, index: int) -> Replica:
        """Return the replica with this index.

        Raises:
            EngineError: It does not exist.
        """
        if index not in self._members:
            raise EngineError(f"replica {index} does not exist; the replicas are {sorted(self._members)}.")
        return self._members[index]

    @property
    def members(self) -> list[Replica]:
        """Return all replicas, including those being added or removed."""
        return list(self._members.values())

    @property
    def running(self) -> list[Replica]:
        """Return the replicas that answer, even if they accept no more requests."""
        return [replica for replica in self.members if replica.is_running]

    @property
    def serving(self) -> list[Replica]:
        """Return the replicas that accept requests now."""
        return [replica for replica in self.members if replica.state == "serving"]

    @property
    def coming_back(self) -> list[Replica]:
        """Return the replicas that are restarting.

        Raises:
            EngineDiedError: There are none.
        """
        found = [replica for replica in self.members if replica.is_coming_back]
        if not found:
            raise self.nobody_left()
        return found

    async def ask_one(self, ask: Callable[[Replica], Awaitable[Any]], input_ids: IntArray, *, ticket: Ticket) -> Any:
        """Ask one replica, and another if that one dies or leaves.

        Raises:
            EngineDiedError: No replica is left, this request kills them, or its caller already has tokens from a dead
                one.
            AbortedError: It was aborted before it reached a replica.
        """
        deaths: list[EngineDiedError] = []
        self._tickets.add(ticket)
        try:
            while not ticket.is_aborted:
                try:
                    async with ticket.stoppable():
                        replica = await self._choose(input_ids)
                        incarnation = replica.incarnation
                        try:
                            return await self._ask(replica, ask, ticket)
                        except EngineDiedError as error:
                            self.note_death(replica, error, incarnation)
                            deaths.append(error)
                except StoppedError:
                    if not ticket.has_told:
                        continue
                    deaths.append(EngineDiedError(f"replica {replica.index} was removed."))
                if ticket.has_told:
                    raise EngineDiedError(
                        "the engine died after a part of the response was streamed, which no other engine can "
                        f"continue. Send the request again. {deaths[-1]}"
                    ) from deaths[-1]
                if len(deaths) == MAX_DEATHS:
                    raise EngineDiedError(
                        f"{MAX_DEATHS} engines died during this request, which may be the cause. The last: {deaths[-1]}"
                    ) from deaths[-1]
            raise AbortedError("the request was aborted before an engine started it.")
        finally:
            self._tickets.discard(ticket)

    async def ask_all(self, ask: Callable[[Replica], Awaitable[Any]]) -> dict[int, Any]:
        """Ask every running replica. Those that die or leave return no answer.

        It does not wait for restarting replicas, because these may wait for weights that the caller publishes next.
        """

        async def one(replica: Replica) -> Any:
            if not replica.is_running:  # it may have died since it was listed
                return None
            incarnation = replica.incarnation
            try:
                return replica.index, await ask(replica)
            except EngineDiedError as error:
                self.note_death(replica, error, incarnation)
            except (EngineError, NotReadyError):
                if not replica.is_gone:
                    raise
            return None

        answers = await asyncio.gather(*map(one, self.running), return_exceptions=True)  # waits for all
        found: list[Any] = [answer for answer in answers if answer is not None]
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return dict(found)

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Stop these requests, or all, from waiting. Engines end the running ones."""
        for ticket in list(self._tickets):
            if request_ids is None or ticket.request_id in request_ids:
                ticket.abort()

    def note_death(self, replica: Replica, error: EngineDiedError, incarnation: int) -> None:
        """Record that a replica died in this incarnation before it answered."""
        if not replica.note_death(error, incarnation):
            return
        self._router.forget(replica.index)
        self._changes.announce()
        log.warning("engine_died", replica=replica.index, state=replica.state, error=str(error))

    def nobody_left(self) -> EngineDiedError:
        """Build an error that describes how each replica died."""
        deaths = [(replica.index, replica.death) for replica in self.members]
        said = "; ".join(f"replica {index}: {death}" for index, death in deaths if death is not None)
        return EngineDiedError(f"none of {len(deaths)} engines serves. {said}")

    # -- inside

    async def _choose(self, input_ids: IntArray) -> Replica:
        while not (found := self._askable()):
            await self._changes.next()
        return self._members[self._router.choose(input_ids, among=[replica.index for replica in found])]

    def _askable(self) -> list[Replica]:
        """Return the replicas that may get a request now. Empty if it has to wait.

        Raises:
            EngineDiedError: It would wait forever.
        """
        self._require_open()
        if found := [replica for replica in self.serving if self._may_begin(replica)]:
            return found
        restarting = [replica for replica in self.members if replica.is_coming_back]
        if any(replica.is_staying or replica.is_joining for replica in self.members):
            return [replica for replica in restarting if replica.served is self.weights.published]
        return self.coming_back

    def _may_begin(self, replica: Replica) -> bool:
        """Return False if it must wait for weights or draining requests, or would start under replaced weights."""
        if replica.index in self.weights.waiting:
            return False
        published = self.weights.published
        if published.drain_deadline_s is None or replica.served is published:
            return True
        return not replica.num_running and not replica.updating.is_taken

    async def _ask(self, replica: Replica, ask: Callable[[Replica], Awaitable[Any]], ticket: Ticket) -> Any:
        with replica.carrying(ticket), self._router.carrying(replica.index, ticket.num_samples):
            await self.weights.bring_asked(replica)
            with replica.answering(ticket):
                return await ask(replica)

    def _require_open(self) -> None:
        if self._is_closed:
            raise NotReadyError("the engine is closed; create a new one.")
