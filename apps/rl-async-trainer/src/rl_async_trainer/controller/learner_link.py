"""The controller's link to the learner: after a death the learner resumes from its last checkpoint."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_async_trainer.messages import StepOrder, TrainedStep, ValidationBatch
from rl_core.cluster import Role, RoleRestartedError, SupervisedRole
from rl_core.data import IntArray, Json
from rl_core.errors import RoleDiedError
from rl_core.weights import ProofTolerances, PublishReport
from rl_distill.checkpoints import Saved
from rl_distill.learner_host import PackedWeights
from rl_rollout.rollouter import PolicyScores
from rl_trainer_parts.rollouts.answers import Answer

IsCurrent = Callable[[], bool]
"""False once the learner was rolled back after a decision."""


class LearnerLink:
    """Calls the learner.

    If the learner dies, the call raises RoleRestartedError once it is back at its last checkpoint and `on_restored` was
    called. Decisions made before that, by `course`, are not sent any more: a step would train on other weights than
    intended, and a checkpoint would get another step's state.
    """

    def __init__(
        self,
        role: Role,
        *,
        find_checkpoint: Callable[[], Path | None],
        on_lost: Callable[[RoleDiedError], Awaitable[None]],
        on_restored: Callable[[Path | None], Awaitable[None]],
    ) -> None:
        """Link to a role.

        Args:
            role: The learner's role.
            find_checkpoint: Returns the newest complete checkpoint.
            on_lost: Called after each death.
            on_restored: Called with the checkpoint from which the learner resumes; None is the initial policy.
        """
        self._find_checkpoint = find_checkpoint
        self._on_restored = on_restored
        self._bare = role
        self._role = SupervisedRole(role, on_lost=on_lost, start=self._restart)
        self._course = 0
        self._held: dict[int, IsCurrent] = {}
        self._num_parameters: int | None = None
        self._num_engines: int | None = None

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        return self._role.num_restarts

    @property
    def is_started(self) -> bool:
        """True while its ranks are running."""
        return self._num_parameters is not None and self._role.is_current

    def course(self) -> IsCurrent:
        """Return a function that later tells whether the learner was rolled back since now."""
        course = self._course
        return lambda: self._course == course

    def went_back(self) -> None:
        """Invalidate earlier decisions, because the learner was rolled back to its checkpoint."""
        self._course += 1

    async def start(self, checkpoint: Path | None) -> int:
        """Start the learner's ranks from a checkpoint, and return the number of parameters; retry if it dies."""
        while self._num_parameters is None:
            try:
                self._num_parameters = await self._call("start", checkpoint)
            except RoleRestartedError:
                continue  # the restart has started it
        return self._num_parameters

    async def train(self, order: StepOrder, is_current: IsCurrent) -> TrainedStep:
        """See `LearnerHost.train`."""
        report: TrainedStep = await self._call("train", order, is_current=is_current)
        return report

    async def pack(self, version: int | None, is_current: IsCurrent) -> PackedWeights:
        """See `LearnerHost.pack`."""
        packed: PackedWeights = await self._call("pack", version, is_current=is_current)
        return packed

    async def prove(
        self, packed: PackedWeights, report: PublishReport, tolerances: ProofTolerances, is_current: IsCurrent
    ) -> PublishReport:
        """See `LearnerHost.prove`; returns the report unchanged if nothing is left to prove."""
        if not report.canary_scores:
            return report
        proven: PublishReport = await self._call("prove", packed.canary, report, tolerances, is_current=is_current)
        return proven

    async def expect_engines(self, count: int) -> None:
        """See `LearnerHost.expect_engines`; a restarted learner expects the same number."""
        self._num_engines = count
        await self._call("expect_engines", count)

    async def save(
        self, step: int, state: Mapping[str, Json], is_current: IsCurrent, *, also_keep: Sequence[int]
    ) -> None:
        """See `LearnerHost.save`."""
        await self._call("save", step, dict(state), list(also_keep), is_current=is_current)

    async def look(self) -> None:
        """Detect the learner's death and restart it, unless that has happened already."""
        try:
            await self._call("check_alive")
        except RoleRestartedError:
            return

    async def wait_saved(self) -> None:
        """See `LearnerHost.wait_saved`."""
        await self._call("wait_saved")

    async def saved(self) -> list[Saved]:
        """See `LearnerHost.saved`."""
        found: list[Saved] = await self._call("saved")
        return found

    async def hold(self, step: int, version: int, is_current: IsCurrent) -> None:
        """See `LearnerHost.hold`; held weights are lost with the learner."""
        await self._call("hold", step, version, is_current=is_current)
        self._held[step] = is_current

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """See `LearnerHost.validate`; fails if the held weights are lost."""
        found: list[Answer] = await self._call("validate", batch, is_current=self._held[batch.step])
        self._held = {step: held for step, held in self._held.items() if step >= batch.step}
        return found

    async def probe(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores | None:
        """See `LearnerHost.probe`; None if the learner died after it answered that step's validation."""
        try:
            found: PolicyScores = await self._call("probe", step, sequences, top_k, is_current=self._held[step])
        except RoleRestartedError:
            return None
        return found

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
