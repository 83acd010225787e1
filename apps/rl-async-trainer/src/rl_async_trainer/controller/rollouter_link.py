"""The controller's end of the rollouter: after a death it is brought back to where it was, before anything goes on."""

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

    When it died, whoever called it waits until it is there again; what it had under way is given back by `on_lost`
    before. What needs weights waits until they were published to it anew.
    """

    def __init__(
        self, role: Role, settings: AsyncSettings, *, on_lost: Callable[[RoleDiedError], Awaitable[None]]
    ) -> None:
        """Speak to a role.

        Args:
            role: The rollouter's.
            settings: Of the run.
            on_lost: Told of each death, before the rollouter serves again.
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
        """How far an engine may be from the learner."""
        return proof_tolerances(self._settings)

    @property
    def num_restarts(self) -> int:
        """How often it was brought back."""
        return self._role.num_restarts

    @property
    def is_started(self) -> bool:
        """True while its engines are there."""
        return self._engine is not None and self._role.is_current

    async def start(self) -> str:
        """Start its engines; again, where it dies meanwhile. Gives the engine's name."""
        while self._engine is None:
            self._engine = await self._call("start")  # None where it died, and `_restart` has started it
        return self._engine

    async def submit(self, dispatches: Sequence[Dispatch], is_current: Callable[[], bool]) -> None:
        """See `Rollouter.submit`; what a dying rollouter was given is given back like the rest.

        Args:
            dispatches: What to generate.
            is_current: False once they were given back, as the rollouter died before it heard of them.
        """
        await self._call("submit", list(dispatches), needs_weights=True, is_current=is_current)

    async def events(self) -> list[GroupEvent]:
        """See `Rollouter.events`."""
        found: list[GroupEvent] | None = await self._call("events", wait_s=EVENTS_WAIT_S)
        return found or []

    async def publish(self, packed: PackedWeights) -> PublishReport | None:
        """See `Rollouter.publish`; None where it died meanwhile: then it has no weights."""
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
        """See `Rollouter.validate`; asked again where the rollouter died."""
        found: list[Answer] | None = None
        while found is None:
            found = await self._call("validate", batch, needs_weights=True)
        return found

    async def probe(self, _step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `Rollouter.scores`; None where it died meanwhile."""
        found: PolicyScores | None = await self._call("scores", sequences, top_k, needs_weights=True)
        return found

    async def window(self, step: int) -> dict[str, Any]:
        """See `Rollouter.window`; of a rollouter that died meanwhile there is nothing."""
        found: dict[str, Any] | None = await self._call("window", step)
        return found or {"metrics": {}, "histograms": {}, "events": [], "rollouts": []}

    async def set_num_engines(self, count: int) -> int:
        """See `Rollouter.set_num_engines`; a rollouter that is started again has as many."""
        found: int | None = None
        while found is None:
            found = await self._call("set_num_engines", count)
        self._num_engines = found
        return found

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What it answers; None where it died before it did, and is there again."""
        return (await self._ask(method, *args, **kwargs))[1]

    async def _ask(
        self,
        method: str,
        *args: Any,
        needs_weights: bool = False,
        is_current: Callable[[], bool] | None = None,
        **kwargs: Any,
    ) -> tuple[int, Any]:
        """As `_call`, with the number of the incarnation that was asked."""
        incarnation = await self._ready(needs_weights=needs_weights)
        if is_current is not None and not is_current():
            return incarnation, None
        try:
            return incarnation, await self._role.call(method, *args, incarnation=incarnation, **kwargs)
        except RoleRestartedError:
            return incarnation, None

    async def _ready(self, *, needs_weights: bool) -> int:
        """Wait until it is there, and has weights where that matters; gives its incarnation."""
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
