"""Publish the learner's weights to the engines, one version after the other, and again if they are lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from rl_async_trainer.controller.links import IsCurrent, LearnerLink, RollouterLink
from rl_core.cluster import RoleRestartedError, within
from rl_core.errors import EngineError, TransferError, WeightProofError
from rl_core.weights import PublishReport
from rl_distill.learner_host import PackedWeights

OnServed = Callable[[PackedWeights, PublishReport], Awaitable[None]]
OnFailedProof = Callable[[int, WeightProofError], None]


class _Request(NamedTuple):
    """Weights to pack.

    Attributes:
        version: Their version; None for the newest.
        is_current: Whether the learner still has the weights for which this was requested.
        is_packed: Done once they are packed; RoleRestartedError if the learner was rolled back.
    """

    version: int | None
    is_current: IsCurrent
    is_packed: "asyncio.Future[None]"


class WeightPublisher:
    """The only publisher, so packed weights stay readable until the engines have loaded them.

    A restarted rollouter has no weights, and its previous ones may be gone: the learner overwrites them with the next
    version, and they die with it. So a restarted rollouter always receives the learner's current weights.
    """

    def __init__(
        self,
        learner: LearnerLink,
        rollouter: RollouterLink,
        changed: asyncio.Condition,
        *,
        deadline_s: float,
        on_served: OnServed,
        on_failed_proof: OnFailedProof,
    ) -> None:
        """Start with nothing to publish.

        Args:
            learner: Packs weights.
            rollouter: Loads weights.
            changed: Condition that announces packed and served versions.
            deadline_s: Maximum time to load weights, and again to finish running responses before that.
            on_served: Called after each publication, before waiting callers resume.
            on_failed_proof: Called with the version and the error before weights are published again.
        """
        self._learner = learner
        self._rollouter = rollouter
        self._changed = changed
        self._deadline_s = 2 * deadline_s
        self._on_served = on_served
        self._on_failed_proof = on_failed_proof
        self._has_failed = False
        self._request: _Request | None = None
        self._packed: PackedWeights | None = None
        self._is_wanted = False

    @property
    def is_live(self) -> bool:
        """True while the learner's weights must not change: they are packed, read by engines, or needed by the canary.

        A step ordered during packing would be trained before the engines have the packed weights.
        """
        return self._request is not None or (self._packed is not None and self._packed.is_live)

    def lost(self) -> None:
        """The engines have lost or missed weights and need the newest ones; `changed` is held."""
        self._is_wanted = True
        self._changed.notify_all()

    async def pack(self, version: int) -> None:
        """Let `run` publish a version once the engines have loaded the previous one, and wait until it is packed.

        Raises:
            RoleRestartedError: The learner was rolled back meanwhile.
        """
        is_current = self._learner.course()
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_settled)
            request = self._begin(version, is_current)
            self._changed.notify_all()
        await request.is_packed

    async def pack_and_wait(self, version: int) -> None:
        """Like `pack`, and wait until the engines serve the weights.

        Raises:
            RoleRestartedError: As in `pack`.
        """
        is_current = self._learner.course()
        await self.pack(version)
        await self.wait_served()
        if not is_current():
            raise RoleRestartedError("the learner died before the engines had its weights.")

    async def wait_served(self) -> None:
        """Wait until the engines serve the newest weights that were requested."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_settled)

    async def run(self) -> None:
        """Pack and publish one version after the other. After a failed proof, weights are packed again, once.

        Raises:
            DeadlineError: The engines did not load them in time.
            WeightProofError: The proof failed twice in succession.
            Exception: An error in an engine or the learner.
        """
        while True:
            request = await self._next()
            packed = await self._pack(request)
            if packed is None:
                continue
            report = await self._publish(packed, request.is_current)
            if report is not None:
                self._has_failed = False
                await self._on_served(packed, report)
            async with self._changed:
                self._packed = None
                self._is_wanted |= report is None
                self._changed.notify_all()

    @property
    def _is_settled(self) -> bool:
        return self._request is None and self._packed is None and not self._is_wanted

    def _begin(self, version: int | None, is_current: IsCurrent) -> _Request:
        self._request = _Request(version, is_current, asyncio.get_running_loop().create_future())
        return self._request

    async def _next(self) -> _Request:
        """Wait for a request, or make one if the engines lost their weights."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._request is not None or self._is_wanted)
            return self._request or self._begin(None, self._learner.course())

    async def _pack(self, request: _Request) -> PackedWeights | None:
        """Pack weights; None if the learner was rolled back."""
        packed, error = None, None
        try:
            packed = await self._learner.when(request.is_current).pack(request.version)
        except RoleRestartedError as caught:
            error = caught
        async with self._changed:
            self._request, self._packed = None, packed
            if packed is not None:
                self._is_wanted = False  # set again if the rollouter dies from now on
            self._changed.notify_all()
        if not request.is_packed.done():  # its caller may be cancelled
            if error is None:
                request.is_packed.set_result(None)
            elif request.version is not None:  # otherwise, nobody waits for it
                request.is_packed.set_exception(error)
        return packed

    async def _publish(self, packed: PackedWeights, is_current: IsCurrent) -> PublishReport | None:
        """Publish; None if weights must be packed again: one side died meanwhile, or the first proof failed."""
        try:
            async with within(
                self._deadline_s,
                f"waited {self._deadline_s:g} s (twice rollout.deadline_s) for the engines to load version "
                f"{packed.update.version} and gave up.",
            ):
                report = await self._rollouter.publish(packed)
                if report is None or not report.canary_scores:
                    return report
                learner = self._learner.when(is_current)
                return await learner.prove(packed.canary, report, self._rollouter.tolerances)
        except RoleRestartedError:
            return None
        except (EngineError, TransferError, WeightProofError) as error:
            await self._learner.check_alive()
            if not is_current():  # other weights follow
                self._has_failed = False
                return None
            if self._has_failed or not isinstance(error, WeightProofError):
                raise
            self._has_failed = True
            self._on_failed_proof(packed.update.version, error)
            return None
