"""The controller's links to its roles: their calls, and what a role needs again after its death."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_async_trainer.messages import StepOrder, TrainedStep, ValidationBatch
from rl_core.cluster import Role, RoleRestartedError, SupervisedRole
from rl_core.data import IntArray, Json
from rl_core.errors import NotReadyError, RoleDiedError
from rl_core.weights import ProofTolerances, PublishReport
from rl_distill.checkpoints import Saved
from rl_distill.learner_host import PackedWeights
from rl_rollout.rollouter import Dispatch, GroupEvent, PolicyScores
from rl_trainer_parts.rollouts.answers import Answer

EVENTS_WAIT_S = 20.0

OnLost = Callable[[RoleDiedError], Awaitable[None]]
IsCurrent = Callable[[], bool]
"""False once a death has voided an earlier decision."""


class RoleLink:
    """A role that is restarted after each death; `_restart` then starts its work again.

    Attributes:
        has_started: True once its models were loaded for the first time.
    """

    def __init__(self, role: Role, *, on_lost: OnLost) -> None:
        """Link to a role.

        Args:
            role: The role.
            on_lost: Called after each death, before the role serves again.
        """
        self._bare = role
        self._role = SupervisedRole(role, on_lost=on_lost, start=self._restart)
        self.has_started = False

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        return self._role.num_restarts

    @property
    def is_started(self) -> bool:
        """True while its models are loaded."""
        return self.has_started and self._role.is_current

    async def _restart(self) -> None:
        await self._bare.call("start")


class LearnerLink(RoleLink):
    """Calls the learner, which resumes from its last checkpoint after a death.

    If the learner dies, the call raises RoleRestartedError once it is back at its last checkpoint and `on_restored` was
    called. Decisions made before that, by `course`, are not sent any more: a step would train on other weights than
    intended, and a checkpoint would get another step's state.
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
        self._num_parameters = 0
        self._num_engines: int | None = None

    def course(self) -> IsCurrent:
        """Return a function that later tells whether the learner was rolled back since now."""
        course = self._course
        return lambda: self._course == course

    def went_back(self) -> None:
        """Invalidate earlier decisions, because the learner was rolled back to its checkpoint."""
        self._course += 1

    async def start(self, checkpoint: Path | None) -> int:
        """Start the learner's ranks from a checkpoint, and return the number of parameters; retry if it dies."""
        with suppress(RoleRestartedError):  # the restart has started it
            self._num_parameters = await self._call("start", checkpoint)
        self.has_started = True
        return self._num_parameters

    async def train(self, order: StepOrder, is_current: IsCurrent) -> TrainedStep:
        """See `RunLearner.train`."""
        report: TrainedStep = await self._call("train", order, is_current=is_current)
        return report

    async def pack(self, version: int | None, is_current: IsCurrent) -> PackedWeights:
        """See `RunLearner.pack`."""
        packed: PackedWeights = await self._call("pack", version, is_current=is_current)
        return packed

    async def prove(
        self, packed: PackedWeights, report: PublishReport, tolerances: ProofTolerances, is_current: IsCurrent
    ) -> PublishReport:
        """See `RunLearner.prove`; returns the report unchanged if nothing is left to prove."""
        if report.canary_scores:
            report = await self._call("prove", packed.canary, report, tolerances, is_current=is_current)
        return report

    async def expect_engines(self, count: int) -> None:
        """See `RunLearner.expect_engines`; a restarted learner expects the same number."""
        self._num_engines = count
        await self._call("expect_engines", count)

    async def save(
        self, step: int, state: Mapping[str, Json], is_current: IsCurrent, *, also_keep: Sequence[int]
    ) -> None:
        """See `RunLearner.save`."""
        await self._call("save", step, dict(state), list(also_keep), is_current=is_current)

    async def check_alive(self) -> None:
        """Detect the learner's death and restart it, unless that has happened already."""
        with suppress(RoleRestartedError):
            await self._call("check_alive")

    async def wait_saved(self) -> None:
        """See `RunLearner.wait_saved`."""
        await self._call("wait_saved")

    async def saved(self) -> list[Saved]:
        """See `RunLearner.saved`."""
        checkpoints: list[Saved] = await self._call("saved")
        return checkpoints

    async def hold(self, step: int, version: int, is_current: IsCurrent) -> None:
        """See `RunLearner.hold`; held weights are lost with the learner."""
        await self._call("hold", step, version, is_current=is_current)
        self._held[step] = is_current

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """See `RunLearner.validate`; fails if the held weights are lost."""
        answers: list[Answer] = await self._call("validate", batch, is_current=self._held[batch.step])
        self._held = {step: held for step, held in self._held.items() if step >= batch.step}
        return answers

    async def probe(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `RunLearner.probe`; None if the learner died after it answered that step's validation."""
        scores: PolicyScores | None = None
        with suppress(RoleRestartedError):
            scores = await self._call("probe", step, sequences, top_k, is_current=self._held[step])
        return scores

    async def _call(self, method: str, *args: Any, is_current: IsCurrent | None = None) -> Any:
        incarnation = await self._role.ready()
        if is_current is not None and not is_current():
            raise RoleRestartedError("the learner was rolled back to its last checkpoint.")
        return await self._role.call(method, *args, incarnation=incarnation)

    async def _restart(self) -> None:
        checkpoint = await asyncio.to_thread(self._find_checkpoint)
        self._num_parameters = await self._bare.call("start", checkpoint)
        if self._num_engines is not None:
            await self._bare.call("expect_engines", self._num_engines)
        await self._on_restored(checkpoint)


class RollouterLink(RoleLink):
    """Calls the rollouter.

    If the rollouter dies, its callers wait until it is back; before that, `on_lost` requeues its unfinished groups.
    Calls that need weights wait until weights were published again.

    Attributes:
        tolerances: Tolerances between engine and learner.
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
        self._drains = drains
        self._has_weights = asyncio.Event()
        self._served = -1
        self._num_engines: int | None = None
        self._engine = ""

    async def start(self) -> str:
        """Start the rollouter's engines; retry if it dies during the start. Return the engine's name."""
        self._engine = await self._call("start") or self._engine  # if it died, `_restart` has started it
        self.has_started = True
        return self._engine

    async def submit(self, dispatches: Sequence[Dispatch], is_current: IsCurrent) -> None:
        """See `RunRollouter.submit`; groups given to a dying rollouter are requeued like the others.

        Args:
            dispatches: Groups to generate.
            is_current: Returns False once the groups were requeued because the rollouter died before it received
                them.
        """
        await self._call("submit", list(dispatches), needs_weights=True, is_current=is_current)

    async def events(self) -> list[GroupEvent]:
        """See `RunRollouter.events`."""
        return await self._call("events", wait_s=EVENTS_WAIT_S) or []

    async def publish(self, packed: PackedWeights) -> PublishReport | None:
        """See `RunRollouter.publish`; None if it died meanwhile and therefore has no weights."""
        incarnation, report = await self._role.ready(), None
        with suppress(RoleRestartedError):
            arguments = packed.update, packed.canary, self.tolerances, self._drains
            report = await self._role.call("publish", *arguments, incarnation=incarnation)
            self._served = incarnation
            self._has_weights.set()
        return report

    async def lacks_weights(self) -> bool:
        """See `RunRollouter.lacks_weights`."""
        return bool(await self._call("lacks_weights"))

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """See `RunRollouter.validate`; called again if the rollouter died."""
        answers: list[Answer] | None = None
        while answers is None:
            answers = await self._call("validate", batch, needs_weights=True)
        return answers

    async def probe(self, _step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `RunRollouter.scores`; None if it died meanwhile."""
        scores: PolicyScores | None = await self._call("scores", sequences, top_k, needs_weights=True)
        return scores

    async def window(self, step: int) -> dict[str, Any]:
        """See `RunRollouter.window`; empty if it died meanwhile."""
        return await self._call("window", step) or {"metrics": {}, "histograms": {}, "events": [], "rollouts": []}

    async def last_events(self) -> list[dict[str, Any]]:
        """See `RunRollouter.last_events`; empty if it died meanwhile."""
        return await self._call("last_events") or []

    async def set_num_engines(self, count: int) -> int:
        """See `RunRollouter.set_num_engines`; a restarted rollouter has the same number."""
        num_engines: int | None = None
        while num_engines is None:
            num_engines = await self._call("set_num_engines", count)
        self._num_engines = num_engines
        return num_engines

    async def _call(
        self, method: str, *args: Any, needs_weights: bool = False, is_current: IsCurrent | None = None, **kwargs: Any
    ) -> Any:
        """Call a method; return None if the rollouter died before it answered and was restarted."""
        while True:
            incarnation = await self._role.ready()
            if not needs_weights or self._served == incarnation:
                break
            self._has_weights.clear()
            await self._has_weights.wait()
        if is_current is None or is_current():
            with suppress(RoleRestartedError):
                return await self._role.call(method, *args, incarnation=incarnation, **kwargs)
        return None

    async def _restart(self) -> None:
        self._engine = await self._bare.call("start")
        if self._num_engines is not None:
            await self._bare.call("set_num_engines", self._num_engines)


class TeachersLink(RoleLink):
    """Calls the teachers' role, which finds unscored rows by itself after a restart."""

    async def start(self) -> None:
        """Start every teacher; retry if the role dies during the start."""
        with suppress(RoleRestartedError):  # the restart has started them
            await self._role.call("start")
        self.has_started = True

    async def serve(self) -> None:
        """Let the teachers score new rows; ends only by an error."""
        while True:
            with suppress(RoleRestartedError):
                await self._role.call("serve")

    async def issued(self) -> None:
        """Notify the teachers of issued prompts."""
        await self._tell("issued")

    async def window(self) -> dict[str, Any]:
        """See `RunTeachers.window`; empty while the teachers restart."""
        return await self._tell("window") or {"metrics": {}, "events": []}

    async def _tell(self, method: str) -> Any:
        """Call the teachers, without waiting if they died."""
        if self.is_started:
            with suppress(RoleDiedError, NotReadyError):
                return await self._bare.call(method)
        return None
