"""The controller's links to its roles: how a role is set up, and what its callers do about its death."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rl_async_trainer.messages import ValidationBatch
from rl_async_trainer.roles.learner import RunLearner
from rl_async_trainer.roles.rollouter import RunRollouter
from rl_async_trainer.roles.teachers import RunTeachers
from rl_core.cluster import Incarnation, Methods, Role, RoleRestartedError, SupervisedRole
from rl_core.data import IntArray
from rl_core.errors import NotReadyError, RLError, RoleDiedError
from rl_core.weights import ProofTolerances, PublishReport
from rl_distill.learner_host import PackedWeights
from rl_rollout.rollouter import Dispatch, GroupEvent, PolicyScores
from rl_trainer_parts.rollouts.answers import Answer

EVENTS_WAIT_S = 20.0

T = TypeVar("T")
OnLost = Callable[[RLError], Awaitable[None]]
IsCurrent = Callable[[], bool]
"""False once a death has voided an earlier decision."""


class RoleLink:
    """A role that is set up again after each death.

    Attributes:
        has_started: True once its models were loaded for the first time.
        num_restarts: Number of restarts.
    """

    def __init__(self, role: Role, *, on_lost: OnLost) -> None:
        """Link to a role.

        Args:
            role: The role.
            on_lost: Called after each death, before the role serves again.
        """
        self._bare = role
        self._role = SupervisedRole(role)
        self._on_lost = on_lost
        self.has_started = False
        self.num_restarts = 0

    @property
    def is_started(self) -> bool:
        """True while its models are loaded."""
        return self.has_started and self._bare.state == "serving"

    async def start(self) -> None:
        """Load its models; again if it dies meanwhile."""
        await self._bare.set_up(self._set_up)
        self.has_started = True

    async def _set_up(self, role: Incarnation) -> None:
        if role.death is not None:
            self.num_restarts += 1
            await self._on_lost(role.death)
        await self._begin(role)

    async def _begin(self, role: Incarnation) -> None:
        """Start its work."""
        raise NotImplementedError


class LearnerLink(RoleLink):
    """Calls the learner, which resumes from its last checkpoint after a death.

    If the learner dies, the call raises RoleRestartedError once it is back at its last checkpoint and `on_restored` was
    called. Decisions made before that, by `course`, are not sent any more: a step would train on other weights than
    intended, and a checkpoint would get another step's state.

    Attributes:
        num_parameters: Number of parameters of the policy, once started.
    """

    def __init__(
        self,
        role: Role,
        *,
        find_checkpoint: Callable[[], Path | None],
        on_lost: OnLost,
        on_restored: Callable[[Path | None], Awaitable[None]],
    ) -> None:
        """Link to a role.

        Args:
            role: The learner's role.
            find_checkpoint: Returns the newest complete checkpoint.
            on_lost: Called after each death.
            on_restored: Called with the checkpoint from which the learner resumes; None is the initial policy.
        """
        super().__init__(role, on_lost=on_lost)
        self._find_checkpoint = find_checkpoint
        self._on_restored = on_restored
        self._course = 0
        self._held: dict[int, IsCurrent] = {}
        self.num_parameters = 0
        self._num_engines: int | None = None

    def course(self) -> IsCurrent:
        """Return a function that later tells whether the learner was rolled back since now."""
        course = self._course
        return lambda: self._course == course

    def went_back(self) -> None:
        """Invalidate earlier decisions, because the learner was rolled back to its checkpoint."""
        self._course += 1

    def when(self, is_current: IsCurrent) -> RunLearner:
        """Return the learner's methods, which raise RoleRestartedError instead of a call that is not current."""
        methods: Any = Methods(partial(self._call, is_current))
        return methods  # type: ignore[no-any-return]

    @property
    def now(self) -> RunLearner:
        """The learner's methods."""
        return self.when(self.course())

    async def expect_engines(self, count: int) -> None:
        """See `RunLearner.expect_engines`; a restarted learner expects the same number."""
        self._num_engines = count
        await self.now.expect_engines(count)

    async def check_alive(self) -> None:
        """Detect the learner's death and wait for its restart, unless that has happened already."""
        with suppress(RoleRestartedError):
            await self.now.check_alive()

    async def hold(self, step: int, version: int, is_current: IsCurrent) -> None:
        """See `RunLearner.hold`; held weights are lost with the learner."""
        await self.when(is_current).hold(step, version)
        self._held[step] = is_current

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """See `RunLearner.validate`; fails if the held weights are lost."""
        answers = await self.when(self._held[batch.step]).validate(batch)
        self._held = {step: held for step, held in self._held.items() if step >= batch.step}
        return answers

    async def probe(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `RunLearner.probe`; None if the learner died after it answered that step's validation."""
        with suppress(RoleRestartedError):
            return await self.when(self._held[step]).probe(step, sequences, top_k)
        return None

    async def _call(self, is_current: IsCurrent, method: str, *args: Any, **kwargs: Any) -> Any:
        incarnation = await self._role.ready()
        if not is_current():
            raise RoleRestartedError("the learner was rolled back to its last checkpoint.")
        return await self._role.call(incarnation, method, *args, **kwargs)

    async def _begin(self, role: Incarnation) -> None:
        learner: RunLearner = role.methods()
        checkpoint = await asyncio.to_thread(self._find_checkpoint)
        self.num_parameters = await learner.start(checkpoint)
        if self._num_engines is not None:
            await learner.expect_engines(self._num_engines)
        if role.death is not None:
            await self._on_restored(checkpoint)


class RollouterLink(RoleLink):
    """Calls the rollouter.

    If the rollouter dies, its callers wait until it is back; before that, `on_lost` requeues its unfinished groups.
    Calls that need weights wait until weights were published again.

    Attributes:
        tolerances: Tolerances between engine and learner.
        engine: Name of its engine, once started.
    """

    def __init__(self, role: Role, *, tolerances: ProofTolerances, drains: bool, on_lost: OnLost) -> None:
        """Link to a role.

        Args:
            role: The rollouter's role.
            tolerances: Tolerances between engine and learner.
            drains: Let engines finish all running responses before new weights.
            on_lost: Called after each death, before the rollouter serves again.
        """
        super().__init__(role, on_lost=on_lost)
        self.tolerances = tolerances
        self.engine = ""
        self._drains = drains
        self._has_weights = asyncio.Event()
        self._served = -1
        self._num_engines: int | None = None

    async def submit(self, dispatches: Sequence[Dispatch], is_current: IsCurrent) -> None:
        """See `Rollouter.submit`; groups given to a dying rollouter are requeued like the others.

        Args:
            dispatches: Groups to generate.
            is_current: Returns False once the groups were requeued because the rollouter died before it received
                them.
        """
        incarnation = await self._with_weights()
        if is_current():
            with suppress(RoleRestartedError):
                await self._at(incarnation).submit(list(dispatches))

    async def events(self) -> list[GroupEvent]:
        """See `Rollouter.events`; empty if it died meanwhile."""
        with suppress(RoleRestartedError):
            return await self._now.events(wait_s=EVENTS_WAIT_S)
        return []

    async def publish(self, packed: PackedWeights) -> PublishReport | None:
        """See `Rollouter.publish`; None if it died meanwhile and therefore has no weights."""
        incarnation = await self._role.ready()
        with suppress(RoleRestartedError):
            rollouter = self._at(incarnation)
            report = await rollouter.publish(packed.update, packed.canary, self.tolerances, self._drains)
            self._served = incarnation
            self._has_weights.set()
            return report
        return None

    async def lacks_weights(self) -> bool:
        """See `Rollouter.lacks_weights`."""
        with suppress(RoleRestartedError):
            return await self._now.lacks_weights()
        return False

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """See `RunRollouter.validate`; called again if the rollouter died."""
        while True:
            with suppress(RoleRestartedError):
                return await self._at(await self._with_weights()).validate(batch)

    async def probe(self, _step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `Rollouter.probe`; None if it died meanwhile."""
        with suppress(RoleRestartedError):
            return await self._at(await self._with_weights()).probe(sequences, top_k)
        return None

    async def window(self, step: int) -> dict[str, Any]:
        """See `RunRollouter.window`; empty if it died meanwhile."""
        with suppress(RoleRestartedError):
            return await self._now.window(step)
        return {"metrics": {}, "histograms": {}, "events": [], "rollouts": []}

    async def last_events(self) -> list[dict[str, Any]]:
        """See `RunRollouter.last_events`; empty if it died meanwhile."""
        with suppress(RoleRestartedError):
            return await self._now.last_events()
        return []

    async def set_num_engines(self, count: int) -> int:
        """See `RunRollouter.set_num_engines`; a restarted rollouter has the same number."""
        while True:
            with suppress(RoleRestartedError):
                self._num_engines = await self._now.set_num_engines(count)
                return self._num_engines

    @property
    def _now(self) -> RunRollouter:
        return self._at(None)

    def _at(self, incarnation: int | None) -> RunRollouter:
        methods: RunRollouter = self._role.methods(incarnation=incarnation)
        return methods

    async def _with_weights(self) -> int:
        """Wait until the rollouter has weights; return the incarnation that has them."""
        while (incarnation := await self._role.ready()) != self._served:
            self._has_weights.clear()
            await self._has_weights.wait()
        return incarnation

    async def _begin(self, role: Incarnation) -> None:
        rollouter: RunRollouter = role.methods()
        self.engine = await rollouter.start()
        if self._num_engines is not None:
            await rollouter.set_num_engines(self._num_engines)


class TeachersLink(RoleLink):
    """Calls the teachers' role, which finds unscored rows by itself after a restart."""

    async def serve(self) -> None:
        """Let the teachers score new rows; ends only by an error."""
        teachers: RunTeachers = self._role.methods()
        while True:
            with suppress(RoleRestartedError):
                await teachers.serve()

    async def issued(self) -> None:
        """Notify the teachers of issued prompts, unless they restart."""
        await self._told(lambda teachers: teachers.issued(), None)

    async def window(self) -> dict[str, Any]:
        """See `RunTeachers.window`; empty while the teachers restart."""
        return await self._told(lambda teachers: teachers.window(), {"metrics": {}, "events": []})

    async def _told(self, call: Callable[[RunTeachers], Awaitable[T]], otherwise: T) -> T:
        """Call the teachers, without waiting if they died."""
        if self.is_started:
            with suppress(RoleDiedError, NotReadyError):
                return await call(self._bare.methods())
        return otherwise

    async def _begin(self, role: Incarnation) -> None:
        teachers: RunTeachers = role.methods()
        await teachers.start()
