"""Objects that the parts of the controller share."""

from collections.abc import Callable
from dataclasses import dataclass

from rl_async_trainer.assemble import Roles
from rl_async_trainer.controller.validator import Validator
from rl_async_trainer.liveness.hang_evidence import HangEvidence
from rl_async_trainer.schedule.places import Places
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
    """Shared parts of the controller.

    Attributes:
        settings: The run's settings.
        roles: The run's roles.
        queue: The queue between them.
        scheduler: Decides which prompts start and which groups make a step.
        supply: Provides prompts.
        places: Place of each prompt in the order of training.
        record: Records what happens.
        validator: Runs validations.
        evidence: Collects what every role is doing.
        stop: Ctrl-C and SIGTERM.
        progress: Called on any progress.
        say: Logs an event.
        lifecycle: Trackers, checkpoints and elapsed time.
        rollouts: Records a step's trajectories.
        memory: Measures the controller's memory.
    """

    settings: AsyncSettings
    roles: Roles
    queue: TransferQueue
    scheduler: Scheduler
    supply: PromptSupply
    places: Places
    record: ScheduleRecord
    validator: Validator
    evidence: HangEvidence
    stop: StopSignal
    progress: Callable[[str], None]
    say: Callable[..., None]
    lifecycle: RunLifecycle
    rollouts: RolloutWriter
    memory: MemoryWatch
