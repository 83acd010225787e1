"""The controller's checkpoints: the learner writes them, and the queue acks the groups of complete ones."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

from rl_async_trainer.controller.learner_link import LearnerLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.controller.step_metrics import StepMetrics
from rl_async_trainer.schedule.run_state import AsyncState
from rl_trainer_parts.rollouts.setup import TRAIN


class Checkpointing:
    """Starts checkpoints, and acks the groups of complete ones."""

    def __init__(self, parts: ControllerParts, learner: LearnerLink, metrics: StepMetrics) -> None:
        """Start without a checkpoint in progress."""
        self._parts = parts
        self._scheduler = parts.scheduler
        self._learner = learner
        self._metrics = metrics
        self._num_saving = 0

    async def begin(self, state: AsyncState) -> None:
        """Let the learner write a checkpoint of its current state; it lists the groups to ack once it is complete."""
        state = replace(state, unacked=self._scheduler.unsaved, wall_s=self._parts.lifecycle.wall_s)
        self._num_saving += 1
        content = asdict(state) | {"unacked": list(state.unacked)}
        kept = sorted(self._parts.lifecycle.goal.kept)
        await self._learner.save(state.step, content, self._learner.course(), also_keep=kept)

    async def wait(self) -> None:
        """Wait until the checkpoint in progress is complete, and ack its groups."""
        await self._learner.wait_saved()
        await self.confirm()

    async def confirm(self) -> None:
        """Ack the groups of newly complete checkpoints."""
        if not self._num_saving:
            return
        for saved in await self._learner.saved():
            self._parts.say(
                "checkpoint_saved", step=saved.step, folder=str(saved.folder), took_s=round(saved.took_s, 3)
            )
            self._num_saving = max(self._num_saving - 1, 0)
            self._metrics.saved(saved.took_s)
            await self.ack(self._scheduler.saved(saved.step))

    async def ack(self, uids: Sequence[str]) -> None:
        """Ack groups that are in a complete checkpoint."""
        if uids:
            await asyncio.to_thread(self._parts.queue.finish, TRAIN, list(uids))
            self._parts.supply.done(uids)
            self._parts.progress("checkpoint")

    def given_up(self) -> None:
        """The learner died, and its unfinished checkpoint is lost."""
        self._num_saving = 0
