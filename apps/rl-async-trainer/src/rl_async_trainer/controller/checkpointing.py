"""The controller's checkpoints: the learner writes them, and the queue acks the groups of complete ones."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

from rl_async_trainer.controller.links import LearnerLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.step_metrics import StepMetrics
from rl_async_trainer.record import AsyncState
from rl_trainer_parts.rollouts.setup import TRAIN


class Checkpointing:
    """Starts checkpoints, and acks the groups of complete ones."""

    def __init__(self, parts: ControllerParts, learner: LearnerLink, metrics: StepMetrics) -> None:
        """Start without a checkpoint in progress."""
        self._parts = parts
        self._learner = learner
        self._metrics = metrics

    async def begin(self, state: AsyncState) -> None:
        """Let the learner write a checkpoint of its current state; it lists the groups to ack once it is complete."""
        unacked = self._parts.scheduler.unsaved
        content = asdict(replace(state, wall_s=self._parts.lifecycle.wall_s)) | {"unacked": list(unacked)}
        kept = sorted(self._parts.lifecycle.goal.kept)
        await self._learner.now.save(state.step, content, kept)

    async def wait(self) -> None:
        """Wait until the checkpoint in progress is complete, and ack its groups."""
        await self._learner.now.wait_saved()
        await self.confirm()

    async def confirm(self) -> None:
        """Ack the groups of newly complete checkpoints."""
        for saved in await self._learner.now.saved():
            self._parts.lifecycle.say_saved(saved)
            self._metrics.saved(saved.took_s)
            await self.ack(self._parts.scheduler.saved(saved.step))

    async def ack(self, uids: Sequence[str]) -> None:
        """Ack groups that are in a complete checkpoint."""
        if uids:
            await asyncio.to_thread(self._parts.queue.finish, TRAIN, list(uids))
            self._parts.supply.done(uids)
            self._parts.progress("checkpoint")
