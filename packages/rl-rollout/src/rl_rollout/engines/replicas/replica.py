"""One of several equal engines, with its weights, requests, state and load."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import EngineDiedError
from rl_core.weights import BFLOAT16_TOLERANCES, Canary, ProofTolerances, PublishReport, WeightReceipt, WeightUpdate
from rl_rollout.engines.process import EngineClient, ProcessEngine
from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.waiting import Changes, RoutedRequest, Turn

Receiver = RolloutEngine | EngineClient
"""What takes a replica's weights: its engine, or the methods of one whose process has just restarted."""

EngineState = Literal["starting", "serving", "restarting", "draining", "dead"]
"""State of an engine; a draining one finishes its requests and accepts no more."""

LIVING: Mapping[str, EngineState] = {"starting": "starting", "serving": "serving", "restarting": "restarting"}
"""State of an engine in this process that is not dead, by the state of its role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one replica, as its caller measures it. Counts and times include restarts.

    Attributes:
        index: Index of the replica.
        state: Current state.
        num_running: Samples that it is generating or scoring.
        busy_s: Seconds with at least one running sample.
        idle_s: Seconds without a running sample, including weight updates, restarts and the time after its end.
        num_tokens: Response tokens of finished samples, including aborted ones.
        num_requests: Requests it received, including unfinished ones.
        num_restarts: Number of restarts.
    """

    index: int
    state: EngineState
    num_running: int
    busy_s: float
    idle_s: float
    num_tokens: int
    num_requests: int
    num_restarts: int


@dataclass(slots=True, kw_only=True, eq=False)
class Published:
    """An update that every replica must serve.

    Attributes:
        update: All weights, or an adapter.
        canary: Sequences for the proof. None relies on the receipt. If only the learner can compare the first replicas'
            logprobs (`prove_canary`), those of a proven replica replace it, for replicas that start later.
        tolerances: Tolerances of the proof.
        drain_deadline_s: Maximum seconds for a replica to finish its requests before the update. None continues them
            with the new weights.
    """

    update: WeightUpdate
    canary: Canary | None = None
    tolerances: ProofTolerances = BFLOAT16_TOLERANCES
    drain_deadline_s: float | None = None

    @property
    def adapter(self) -> str | None:
        """Name of its adapter; None for all weights."""
        return None if self.update.adapter is None else self.update.adapter.name


Weights = tuple[Published, ...]
"""The updates in force, in their order: all weights, or adapters of different names."""
FROM_DISK: Weights = ()
"""The weights that an engine serves before its first update."""


def without(weights: Weights, adapter: str | None) -> Weights:
    """Return weights without an adapter, or without all weights."""
    return tuple(one for one in weights if one.adapter != adapter)


class Replica:
    """An engine of a `ReplicatedEngine`.

    Attributes:
        index: Its index. Indices of removed replicas are not reused.
        engine: The engine.
        served: The weights it serves. None if unknown.
        proven: Those of the updates in force that it serves for certain, also if `served` is unknown.
        receipt: Its receipt of the last update.
        report: Report of the proof of these weights; None for those it loaded itself.
        updating: Lock for sending it weights.
        requests: Its requests, running or waiting.
        num_running: Samples in progress.
        num_tokens: See `EngineLoad`.
        num_restarts: See `EngineLoad`.
        failure: Why it no longer answers.
        incarnation: 1, plus 1 per restart.
        is_joining: True until it has been added.
        is_leaving: Whether it is being removed and accepts no more requests.
        is_draining: Whether it ends its requests before a weight update, and accepts none until it has the weights.
        is_gone: Whether it was removed.
    """

    def __init__(
        self, index: int, engine: RolloutEngine, *, changes: Changes, clock: Callable[[], float], is_joining: bool
    ) -> None:
        """Wrap an engine that is not started yet.

        Args:
            index: Its index.
            engine: The engine.
            changes: Announces when it becomes idle.
            clock: Returns seconds, for its load.
            is_joining: Whether it is being added.
        """
        self.index = index
        self.engine = engine
        self.served: Weights | None = FROM_DISK
        self.proven: Weights = FROM_DISK
        self.receipt: WeightReceipt | None = None
        self.report: PublishReport | None = None
        self.updating = Turn()
        self.requests: set[RoutedRequest] = set()
        self.num_running = self.num_tokens = self.num_restarts = 0
        self.failure: EngineDiedError | None = None
        self.incarnation = 1
        self.is_joining = is_joining
        self.is_leaving = False
        self.is_draining = False
        self.is_gone = False
        self._changes, self._clock = changes, clock
        self._left = Changes()
        self._num_requests = 0
        self._busy_s = self._busy_since = 0.0
        self._began_at: float | None = None

    @property
    def state(self) -> EngineState:
        """Its state. A draining replica finishes its requests and accepts no more."""
        if self.is_joining:
            return "starting"
        state = self._process_state
        return "draining" if state == "serving" and (self.is_leaving or self.is_draining) else state

    @property
    def is_running(self) -> bool:
        """True while it can answer, even if it accepts no more requests."""
        return not self.is_joining and self._process_state == "serving"

    @property
    def is_staying(self) -> bool:
        """True while it can answer, and accepts requests now or after it has drained."""
        return self.is_running and not self.is_leaving

    @property
    def is_coming_back(self) -> bool:
        """True while it restarts. A replica that is being added was not there before, so it does not count."""
        return not self.is_leaving and not self.is_joining and self.state in ("starting", "restarting")

    @property
    def _process_state(self) -> EngineState:
        if not isinstance(self.engine, ProcessEngine):
            return "serving" if self.failure is None else "dead"
        return LIVING.get(self.engine.state, "dead")

    @property
    def load(self) -> EngineLoad:
        """Its load so far."""
        now = self._clock()
        busy_s = self._busy_s + (now - self._busy_since if self.num_running else 0.0)
        lived_s = 0.0 if self._began_at is None else now - self._began_at
        return EngineLoad(
            index=self.index,
            state="starting" if self._began_at is None else self.state,
            num_running=self.num_running,
            busy_s=busy_s,
            idle_s=max(lived_s - busy_s, 0.0),
            num_tokens=self.num_tokens,
            num_requests=self._num_requests,
            num_restarts=self.num_restarts,
        )

    @property
    def death(self) -> EngineDiedError | None:
        """Why it no longer serves. It may die while it has no requests."""
        return self.failure or (self.engine.death if isinstance(self.engine, ProcessEngine) else None)

    @contextmanager
    def carrying(self, routed: RoutedRequest) -> Iterator[None]:
        """Record a request as assigned to this replica within the context."""
        self.requests.add(routed)
        try:
            yield
        finally:
            self.requests.discard(routed)
            self._left.announce()

    @contextmanager
    def answering(self, routed: RoutedRequest) -> Iterator[None]:
        """Record a request as running within the context."""
        routed.is_running = True
        if not self.num_running:
            self._busy_since = self._clock()
        self.num_running += routed.num_samples
        self._num_requests += 1
        try:
            yield
        finally:
            routed.is_running = False
            self.num_running -= routed.num_samples
            if not self.num_running:
                self._busy_s += self._clock() - self._busy_since
                self._changes.announce()

    async def emptied(self) -> None:
        """Wait until it has no requests."""
        while self.requests:
            await self._left.next()

    def note_death(self, error: EngineDiedError, incarnation: int) -> bool:
        """Record that it died in this incarnation. After a restart, it has its initial weights again.

        Returns:
            False if it has restarted since, so that the news of its death is late.
        """
        if incarnation != self.incarnation:
            return False
        self.failure = error
        self.served = self.proven = FROM_DISK
        return True

    def withdraw(self, adapter: str) -> bool:
        """Record that it must not serve an adapter; return whether it did."""
        had_it = any(one.adapter == adapter for one in self.proven)
        self.proven = without(self.proven, adapter)
        if self.served is not None:
            self.served = without(self.served, adapter)
        return had_it

    def begin(self) -> None:
        """Record that it has started. It is busy or idle from now on."""
        self.is_joining = False
        self._began_at = self._clock()

    def note_restart(self) -> None:
        """Record that it restarted. It gets weights before any request."""
        self.incarnation += 1
        self.failure = None
        self.served = self.proven = FROM_DISK
