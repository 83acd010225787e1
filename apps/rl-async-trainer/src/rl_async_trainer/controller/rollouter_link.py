"""The controller's link to the rollouter: after a death its state is restored before calls continue."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_async_trainer.messages import ValidationBatch
from rl_async_trainer.settings import AsyncSettings
from rl_core.cluster import Role, RoleRestartedError, SupervisedRole
from rl_core.data import IntArray
from rl_core.errors import RoleDiedError
from rl_core.weights import ProofTolerances, PublishReport
from rl_distill.learner_host import PackedWeights
from rl_rollout.rollouter import Dispatch, GroupEvent, PolicyScores
from rl_trainer_parts.learning.parts import proof_tolerances
from rl_trainer_parts.rollouts.answers import Answer

EVENTS_WAIT_S = 20.0


class RollouterLink:
    """Calls the rollouter.

    If the rollouter dies, its callers wait until it is back; before that, `on_lost` requeues its unfinished groups.
    Calls that need weights wait until weights were published again.
    """

    def __init__(
        self, role: Role, settings: AsyncSettings, *, on_lost: Callable[[RoleDiedError], Awaitable[None]]
    ) -> None:
        """Link to a role.

        Args:
            role: The rollouter's role.
            settings: The run's settings.
            on_lost: Called after each death, before the rollouter serves again.
        """
        self._settings = settings
        self._bare = role
        self._role = SupervisedRole(role, on_lost=on_lost, start=self._restart)
        self._has_weights = asyncio.Event()
        self._served = -1
        self._num_engines: int | None = None
        self._engine: str | None = None

    @property
    def tolerances(self) -> ProofTolerances:
        """Tolerances between engine and learner."""
        return proof_tolerances(self._settings)

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        return self._role.num_restarts

    @property
    def is_started(self) -> bool:
        """True while its engines are running."""
        return self._engine is not None and self._role.is_current

    async def start(self) -> str:
        """Start the rollouter's engines; retry if it dies during the start. Return the engine's name."""
        while self._engine is None:
            self._engine = await self._call("start")  # None if it died; then `_restart` has started it
        return self._engine

    async def submit(self, dispatches: Sequence[Dispatch], is_current: Callable[[], bool]) -> None:
        """See `Rollouter.submit`; groups given to a dying rollouter are requeued like the others.

        Args:
            dispatches: Groups to generate.
            is_current: Returns False once the groups were requeued because the rollouter died before it received
                them.
        """
        await self._call("submit", list(dispatches), needs_weights=True, is_current=is_current)

    async def events(self) -> list[GroupEvent]:
        """See `Rollouter.events`."""
        found: list[GroupEvent] | None = await self._call("events", wait_s=EVENTS_WAIT_S)
        return found or []

    async def publish(self, packed: PackedWeights) -> PublishReport | None:
        """See `Rollouter.publish`; None if it died meanwhile and therefore has no weights."""
        drain = not self._settings.schedule.partial_rollout
        arguments = packed.update, packed.canary, self.tolerances, drain
        report: PublishReport | None
        incarnation, report = await self._ask("publish", *arguments)
        if report is not None:
            self._served = incarnation
            self._has_weights.set()
        return report

    async def lacks_weights(self) -> bool:
        """See `Rollouter.lacks_weights`."""
        return bool(await self._call("lacks_weights"))

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """See `Rollouter.validate`; called again if the rollouter died."""
        found: list[Answer] | None = None
        while found is None:
            found = await self._call("validate", batch, needs_weights=True)
        return found

    async def probe(self, _step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `Rollouter.scores`; None if it died meanwhile."""
        found: PolicyScores | None = await self._call("scores", sequences, top_k, needs_weights=True)
        return found

    async def window(self, step: int) -> dict[str, Any]:
        """See `Rollouter.window`; empty if it died meanwhile."""
        found: dict[str, Any] | None = await self._call("window", step)
        return found or {"metrics": {}, "histograms": {}, "events": [], "rollouts": []}

    async def last_events(self) -> list[dict[str, Any]]:
        """See `Rollouter.last_events`; empty if it died meanwhile."""
        found: list[dict[str, Any]] | None = await self._call("last_events")
        return found or []

    async def set_num_engines(self, count: int) -> int:
        """See `Rollouter.set_num_engines`; a restarted rollouter has the same number."""
        found: int | None = None
        while found is None:
            found = await self._call("set_num_engines", count)
        self._num_engines = found
        return found

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; return None if the rollouter died before it answered and was restarted."""
        return (await self._ask(method, *args, **kwargs))[1]

    async def _ask(
        self,
        method: str,
        *args: Any,
        needs_weights: bool = False,
        is_current: Callable[[], bool] | None = None,
        **kwargs: Any,
    ) -> tuple[int, Any]:
        """Like `_call`, but also return the number of the called incarnation."""
        incarnation = await self._ready(needs_weights=needs_weights)
        if is_current is not None and not is_current():
            return incarnation, None
        try:
            return incarnation, await self._role.call(method, *args, incarnation=incarnation, **kwargs)
        except RoleRestartedError:
            return incarnation, None

    async def _ready(self, *, needs_weights: bool) -> int:
        """Wait until it is running, and has weights if needed; return its incarnation."""
        while True:
            incarnation = await self._role.ready()
            if not needs_weights or self._served == incarnation:
                return incarnation
            self._has_weights.clear()
            await self._has_weights.wait()

    async def _restart(self) -> None:
        self._engine = await self._bare.call("start")
        if self._num_engines is not None:
            await self._bare.call("set_num_engines", self._num_engines)
