"""What the parts of the controller share."""

from collections.abc import Callable
from dataclasses import dataclass

from rl_async_trainer.assemble import Roles
from rl_async_trainer.controller.validator import Validator
from rl_async_trainer.liveness.hang_evidence import HangEvidence
from rl_async_trainer.schedule.record import ScheduleRecord
from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_metrics.reductions import MemoryWatch
from rl_rollout.prompts import PromptSupply
from rl_rollout.schedule import Scheduler
from rl_trainer_parts.reporting.rollout_rows import RolloutWriter
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """What the controller works with.

    Attributes:
        settings: Of the run.
        roles: Who works.
        queue: Between them.
        scheduler: Decides.
        supply: Gives prompts.
        record: Of what happens.
        validator: Asks and gathers validation problems.
        evidence: Asks all roles what they do.
        stop: Ctrl-C and SIGTERM.
        progress: Told of each progress.
        say: Writes an event.
        lifecycle: Knows trackers, checkpoints, and the time that was spent.
        rollouts: Writes trajectories of a step down.
        memory: Measures that of the controller's process.
    """

    settings: AsyncSettings
    roles: Roles
    queue: TransferQueue
    scheduler: Scheduler
    supply: PromptSupply
    record: ScheduleRecord
    validator: Validator
    evidence: HangEvidence
    stop: StopSignal
    progress: Callable[[str], None]
    say: Callable[..., None]
    lifecycle: RunLifecycle
    rollouts: RolloutWriter
    memory: MemoryWatch
