"""The current replicas, and the choice of the replica that answers a request when others die or leave."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import structlog

from rl_core.data import IntArray
from rl_core.errors import EngineDiedError, EngineError, NotReadyError
from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.replicas.replica import Replica
from rl_rollout.engines.replicas.weights import ReplicaWeights
from rl_rollout.engines.waiting import Changes, RoutedRequest, StoppedError

log = structlog.get_logger(__name__)
AnswerT = TypeVar("AnswerT")

MAX_DEATHS = 3
"""Maximum number of engines that may die under one request before the request is refused as the cause."""


class ReplicaSet:
    """Replicas by index, and the requests in progress.

    Attributes:
        weights: The weights that all of them must serve.
        changes: Announces when a replica starts or stops accepting requests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without replicas.

        Args:
            clock: Returns seconds, for the replicas' loads.
        """
        self._clock = clock
        self._members: dict[int, Replica] = {}
        self._router = Router(0)
        self.changes = Changes()
        self._requests: set[RoutedRequest] = set()
        self._is_closed = False
        self.weights = ReplicaWeights(self.changes, self._members)

    def enter(self, engine: RolloutEngine, *, is_joining: bool) -> Replica:
        """Add a replica.

        Raises:
            NotReadyError: The set is closed.
        """
        self._require_open()
        index = self._router.add()
        replica = Replica(index, engine, changes=self.changes, clock=self._clock, is_joining=is_joining)
        self._members[replica.index] = replica
        return replica

    def leave(self, replica: Replica) -> None:
        """Remove a replica."""
        replica.is_gone = True
        del self._members[replica.index]
        self._router.forget(replica.index)
        self.changes.announce()

    def close(self) -> None:
        """Close the set. Requests stop waiting."""
        self._is_closed = True
        self.changes.announce()

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
        restarting = [replica for replica in self.members if replica.is_coming_back]
        if not restarting:
            raise self.nobody_left()
        return restarting

    async def ask_one(
        self, ask: Callable[[Replica], Awaitable[AnswerT]], input_ids: IntArray, *, routed: RoutedRequest
    ) -> AnswerT | None:
        """Ask one replica, and another if that one dies or leaves.

        Returns:
            Its answer; None if the request was aborted before it reached a replica.

        Raises:
            EngineDiedError: No replica is left, this request kills them, or its caller already has tokens from a dead
                one.
        """
        deaths: list[EngineDiedError] = []
        self._requests.add(routed)
        try:
            while not routed.is_aborted:
                try:
                    async with routed.stoppable():
                        replica = await self._choose(input_ids)
                        incarnation = replica.incarnation
                        try:
                            return await self._ask(replica, ask, routed)
                        except EngineDiedError as error:
                            self.note_death(replica, error, incarnation)
                            deaths.append(error)
                except StoppedError:
                    if not routed.has_streamed:
                        continue
                    deaths.append(EngineDiedError(f"replica {replica.index} was removed."))
                if routed.has_streamed:
                    raise EngineDiedError(
                        "the engine died after a part of the response was streamed, which no other engine can "
                        f"continue. Send the request again. {deaths[-1]}"
                    ) from deaths[-1]
                if len(deaths) == MAX_DEATHS:
                    raise EngineDiedError(
                        f"{MAX_DEATHS} engines died during this request, which may be the cause. The last: {deaths[-1]}"
                    ) from deaths[-1]
            return None
        finally:
            self._requests.discard(routed)

    async def ask_all(self, ask: Callable[[Replica], Awaitable[AnswerT]]) -> dict[int, AnswerT]:
        """Ask every running replica. Those that die or leave return no answer.

        It does not wait for restarting replicas, because these may wait for weights that the caller publishes next.
        """

        async def ask_if_running(replica: Replica) -> tuple[int, AnswerT] | None:
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

        answers = await asyncio.gather(*map(ask_if_running, self.running), return_exceptions=True)  # waits for all
        return dict(answer for answer in or_first_error(answers) if answer is not None)

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Stop these requests, or all, from waiting. Engines end the running ones."""
        for routed in list(self._requests):
            if request_ids is None or routed.request_id in request_ids:
                routed.abort()

    def note_death(self, replica: Replica, error: EngineDiedError, incarnation: int) -> None:
        """Record that a replica died in this incarnation before it answered."""
        if not replica.note_death(error, incarnation):
            return
        self._router.forget(replica.index)
        self.changes.announce()
        log.warning("engine_died", replica=replica.index, state=replica.state, error=str(error))

    def nobody_left(self) -> EngineDiedError:
        """Build an error that describes how each replica died."""
        deaths = [(replica.index, replica.death) for replica in self.members]
        causes = "; ".join(f"replica {index}: {death}" for index, death in deaths if death is not None)
        return EngineDiedError(f"none of {len(deaths)} engines serves. {causes}")

    # -- inside

    async def _choose(self, input_ids: IntArray) -> Replica:
        while not (able := self._askable()):
            await self.changes.next()
        return self._members[self._router.choose(input_ids, among=[replica.index for replica in able])]

    def _askable(self) -> list[Replica]:
        """Return the replicas that may get a request now. Empty if it has to wait.

        Raises:
            EngineDiedError: It would wait forever.
        """
        self._require_open()
        if able := [replica for replica in self.serving if self._may_begin(replica)]:
            return able
        if not any(replica.is_staying or replica.is_joining for replica in self.members):
            return self.coming_back
        restarting = (replica for replica in self.members if replica.is_coming_back)
        return [replica for replica in restarting if replica.served == self.weights.published]

    def _may_begin(self, replica: Replica) -> bool:
        """Return False if it must wait for weights or draining requests, or would start under replaced weights."""
        if replica.index in self.weights.waiting:
            return False
        if self.weights.drain_deadline_s is None or replica.served == self.weights.published:
            return True
        return not replica.num_running and not replica.updating.is_taken

    async def _ask(
        self, replica: Replica, ask: Callable[[Replica], Awaitable[AnswerT]], routed: RoutedRequest
    ) -> AnswerT:
        with replica.carrying(routed), self._router.carrying(replica.index, routed.num_samples):
            await self.weights.deliver(replica)
            with replica.answering(routed):
                return await ask(replica)

    def _require_open(self) -> None:
        if self._is_closed:
            raise NotReadyError("the engine is closed; create a new one.")


BLOCK_TOKENS = 16
"""Tokens per block. Prefixes are compared in blocks, as engines cache them."""
MAX_BLOCKS = 1 << 17
"""Maximum number of remembered blocks over all engines. The least recently used are dropped."""


def or_first_error(results: Sequence[AnswerT | BaseException]) -> list[AnswerT]:
    """Return the results of `asyncio.gather` with return_exceptions, or raise the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class Router:
    """Distributes requests over engines by load and by prefix. Use it on one event loop.

    Load is the number of samples in progress. A request goes to the engine with the longest cached prefix of its
    prompt, provided that its load is at most `max_ratio` times the lowest, plus `slack` samples.
    """

    def __init__(self, num_engines: int, *, max_ratio: float = 1.25, slack: int = 8) -> None:
        """Start with no load and no known prefixes."""
        self.loads = [0] * num_engines
        self._max_ratio = max_ratio
        self._slack = slack
        self._owners: OrderedDict[bytes, int] = OrderedDict()

    def add(self) -> int:
        """Add an engine and return its index."""
        self.loads.append(0)
        return len(self.loads) - 1

    def choose(self, input_ids: IntArray, *, among: Collection[int]) -> int:
        """Choose the engine for a prompt.

        Args:
            input_ids: [P] int32.
            among: Engines that serve; at least one.
        """
        blocks = list(_block_digests(input_ids))
        least = min(self.loads[index] for index in among)
        fitting = [index for index in among if self.loads[index] <= least * self._max_ratio + self._slack]
        depths = dict.fromkeys(fitting, 0)
        for depth, block in enumerate(blocks, start=1):
            owner = self._owners.get(block)
            if owner in depths:
                depths[owner] = depth
        chosen = min(fitting, key=lambda index: (-depths[index], self.loads[index], index))
        for block in blocks:
            self._owners[block] = chosen
            self._owners.move_to_end(block)
        while len(self._owners) > MAX_BLOCKS:
            self._owners.popitem(last=False)
        return chosen

    @contextmanager
    def carrying(self, index: int, num_samples: int) -> Iterator[None]:
        """Count samples as in progress on an engine."""
        self.loads[index] += num_samples
        try:
            yield
        finally:
            self.loads[index] -= num_samples

    def forget(self, index: int) -> None:
        """Forget an engine's cached prefixes."""
        for block in [block for block, owner in self._owners.items() if owner == index]:
            del self._owners[block]


def _block_digests(input_ids: IntArray) -> Iterator[bytes]:
    """Return a digest for each prefix of complete blocks, shortest first."""
    digest = blake2b(digest_size=12)
    content = np.ascontiguousarray(input_ids, dtype=np.int32)
    for start in range(0, len(content) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(content[start : start + BLOCK_TOKENS].tobytes())
        yield digest.digest()
