"""Objects that the parts of the controller share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_async_trainer.record import ScheduleRecord
from rl_async_trainer.restoring import PromptPlaces
from rl_async_trainer.settings import AsyncSettings
from rl_core import TransferQueue
from rl_core.cluster import Role
from rl_metrics.reductions import MemoryWatch
from rl_rollout.prompts import PromptSupply
from rl_rollout.schedule import Scheduler
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """Shared parts of the controller.

    Attributes:
        settings: The run's settings.
        inputs: Its prompts and tokenizer.
        roles: Its roles: "rollouter", "learner" and, if there are any, "teachers".
        queue: The queue between them.
        scheduler: Decides which prompts start and which groups make a step.
        supply: Provides prompts.
        places: Place of each prompt in the order of training.
        record: Records what happens.
        stop: Ctrl-C and SIGTERM.
        progress: Called on any progress.
        lifecycle: Events, trackers, records, checkpoints and elapsed time.
        memory: Measures the controller's memory.
    """

    settings: AsyncSettings
    inputs: Inputs
    roles: Mapping[str, Role]
    queue: TransferQueue
    scheduler: Scheduler
    supply: PromptSupply
    places: PromptPlaces
    record: ScheduleRecord
    stop: StopSignal
    progress: Callable[[str], None]
    lifecycle: RunLifecycle
    memory: MemoryWatch
