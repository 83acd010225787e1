"""One of several equal engines: what it serves, who is with it, and the outcome of it."""

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
"""What the process of an engine that is not dead does, in the words of roles."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published:
    """What every replica must serve.

    Attributes:
        update: None for what engines load by themselves.
        canary: None where nothing but the receipt proves it.
        tolerances: Of the proof.
        drain_deadline_s: How long a replica may take to end its requests before it takes this; None where they go on
            under the new weights.
    """

    update: WeightUpdate | None = None
    canary: Canary | None = None
    tolerances: ProofTolerances = BFLOAT16_TOLERANCES
    drain_deadline_s: float | None = None


FROM_DISK = Published()
"""What an engine serves before its first update."""


class Replica:
    """An engine of a `ReplicatedEngine`.

    Attributes:
        index: Its number; those of replicas that went are not given again.
        engine: The engine.
        served: What it serves; None where that is not known.
        report: Of the proof that it serves that, where there was a canary.
        updating: Whose turn it is to give it weights.
        tickets: The requests that are with it, asked or not yet.
        meter: Counts what it does.
        failure: Why it answers no more.
        incarnation: 1, and one more each time it was started again.
        is_joining: True until it has been added.
        is_leaving: It is to be removed, and takes no more requests.
        is_draining: It ends its requests before it takes weights, and takes no more until it has them.
        is_gone: It was removed.
    """

    def __init__(
        self, index: int, engine: RolloutEngine, *, meter: LoadMeter, changes: Changes, is_joining: bool = False
    ) -> None:
        """An engine that is not started yet.

        Args:
            index: Its number.
            engine: The engine.
            meter: Counts what it does.
            changes: Where it is announced that it has nothing to do any more.
            is_joining: It is being added.
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
        """What it does; a draining one ends what it has, and takes no more."""
        if self.is_joining:
            return "starting"
        state = self._process_state
        if state == "serving":
            return "draining" if self.is_leaving or self.is_draining else "serving"
        return state

    @property
    def is_running(self) -> bool:
        """True while it can be asked, though it may take no more requests."""
        return not self.is_joining and self._process_state == "serving"

    @property
    def is_staying(self) -> bool:
        """True while it can be asked, and takes requests, or will once it was drained."""
        return self.is_running and not self.is_leaving

    @property
    def is_coming_back(self) -> bool:
        """True while it does not answer, but will; one that is being added was not there before."""
        return not self.is_leaving and not self.is_joining and self.state in ("starting", "restarting")

    @property
    def _process_state(self) -> EngineState:
        if not isinstance(self.engine, ProcessEngine):
            return "serving" if self.failure is None else "dead"
        return LIVING.get(self.engine.state, "dead")

    @property
    def num_running(self) -> int:
        """Samples that it was asked for, and has not ended."""
        return self.meter.num_running

    @property
    def load(self) -> EngineLoad:
        """What it has done so far."""
        return self.meter.load(self.index, self.state if self.meter.is_alive else "starting")

    @property
    def death(self) -> EngineDiedError | None:
        """Why it serves no more; one may die while nobody asks it anything."""
        return self.failure or (self.engine.death if isinstance(self.engine, ProcessEngine) else None)

    @contextmanager
    def carrying(self, ticket: Ticket) -> Iterator[None]:
        """A request is with it."""
        self.tickets.add(ticket)
        try:
            yield
        finally:
            self.tickets.discard(ticket)
            self._left.announce()

    @contextmanager
    def answering(self, ticket: Ticket) -> Iterator[None]:
        """It is asked."""
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
        """Wait until no request is with it."""
        while self.tickets:
            await self._left.next()

    def note_death(self, error: EngineDiedError, incarnation: int) -> bool:
        """It has died in this incarnation; where it is started again, it has the weights that it had at first.

        Returns:
            False where it has been started again since: who asked it before hears late of its death.
        """
        if incarnation != self.incarnation:
            return False
        self.failure = error
        self.served = FROM_DISK
        return True

    def begin_life(self) -> None:
        """It is started again, and takes weights before anybody asks it."""
        self.incarnation += 1
        self.failure = None
        self.served = FROM_DISK
