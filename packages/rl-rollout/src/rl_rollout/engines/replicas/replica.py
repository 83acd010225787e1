"""One of several equal engines, with its weights, requests and state."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rl_core.errors import EngineDiedError
from rl_core.weights import BFLOAT16_TOLERANCES, Canary, ProofTolerances, PublishReport, WeightUpdate
from rl_rollout.engines.engine_load import EngineLoad, EngineState, LoadMeter
from rl_rollout.engines.process import ProcessEngine
from rl_rollout.engines.protocol import RolloutEngine
from rl_rollout.engines.tickets import Ticket
from rl_rollout.engines.waiting import Changes, Turn

LIVING: Mapping[str, EngineState] = {"starting": "starting", "serving": "serving", "restarting": "restarting"}
"""State of an engine in this process that is not dead, by the state of its role."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published:
    """The weights that every replica must serve.

    Attributes:
        update: None for the weights that engines load themselves.
        canary: Sequences for the proof. None relies on the receipt.
        tolerances: Tolerances of the proof.
        drain_deadline_s: Maximum seconds for a replica to finish its requests before the update. None continues them
            with the new weights.
    """

    update: WeightUpdate | None = None
    canary: Canary | None = None
    tolerances: ProofTolerances = BFLOAT16_TOLERANCES
    drain_deadline_s: float | None = None


FROM_DISK = Published()
"""The weights that an engine serves before its first update."""


class Replica:
    """An engine of a `ReplicatedEngine`.

    Attributes:
        index: Its index. Indices of removed replicas are not reused.
        engine: The engine.
        served: The weights it serves. None if unknown.
        report: Report of the proof, if there was a canary.
        updating: Lock for sending it weights.
        tickets: Its requests, running or waiting.
        meter: Measures its load.
        failure: Why it no longer answers.
        incarnation: 1, plus 1 per restart.
        is_joining: True until it has been added.
        is_leaving: Whether it is being removed and accepts no more requests.
        is_draining: Whether it ends its requests before a weight update, and accepts none until it has the weights.
        is_gone: Whether it was removed.
    """

    def __init__(
        self, index: int, engine: RolloutEngine, *, meter: LoadMeter, changes: Changes, is_joining: bool = False
    ) -> None:
        """Wrap an engine that is not started yet.

        Args:
            index: Its index.
            engine: The engine.
            meter: Measures its load.
            changes: Announces when it becomes idle.
            is_joining: Whether it is being added.
        """
        self.index = index
        self.engine = engine
        self.served: Published | None = FROM_DISK
        self.report: PublishReport | None = None
        self.updating = Turn()
        self.tickets: set[Ticket] = set()
        self.meter = meter
        self.failure: EngineDiedError | None = None
        self.incarnation = 1
        self.is_joining = is_joining
        self.is_leaving = False
        self.is_draining = False
        self.is_gone = False
        self._changes = changes
        self._left = Changes()

    @property
    def state(self) -> EngineState:
        """Its state. A draining replica finishes its requests and accepts no more."""
        if self.is_joining:
            return "starting"
        state = self._process_state
        if state == "serving":
            return "draining" if self.is_leaving or self.is_draining else "serving"
        return state

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
    def num_running(self) -> int:
        """Number of samples in progress."""
        return self.meter.num_running

    @property
    def load(self) -> EngineLoad:
        """Its load so far."""
        return self.meter.load(self.index, self.state if self.meter.is_alive else "starting")

    @property
    def death(self) -> EngineDiedError | None:
        """Why it no longer serves. It may die while it has no requests."""
        return self.failure or (self.engine.death if isinstance(self.engine, ProcessEngine) else None)

    @contextmanager
    def carrying(self, ticket: Ticket) -> Iterator[None]:
        """Record a request as assigned to this replica within the context."""
        self.tickets.add(ticket)
        try:
            yield
        finally:
            self.tickets.discard(ticket)
            self._left.announce()

    @contextmanager
    def answering(self, ticket: Ticket) -> Iterator[None]:
        """Record a request as running within the context."""
        ticket.is_asked = True
        self.meter.begin(ticket.num_samples)
        try:
            yield
        finally:
            ticket.is_asked = False
            self.meter.end(ticket.num_samples)
            if not self.num_running:
                self._changes.announce()

    async def emptied(self) -> None:
        """Wait until it has no requests."""
        while self.tickets:
            await self._left.next()

    def note_death(self, error: EngineDiedError, incarnation: int) -> bool:
        """Record that it died in this incarnation. After a restart, it has its initial weights again.

        Returns:
            False if it has restarted since, so that the news of its death is late.
        """
        if incarnation != self.incarnation:
            return False
        self.failure = error
        self.served = FROM_DISK
        return True

    def begin_life(self) -> None:
        """Record that it restarted. It gets weights before any request."""
        self.incarnation += 1
        self.failure = None
        self.served = FROM_DISK
