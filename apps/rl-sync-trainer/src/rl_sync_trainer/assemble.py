"""The parts of the synchronous loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core import Prompt, TransferQueue
from rl_core.weights import WeightTransport
from rl_distill.teacher import TeacherService
from rl_metrics.reductions import MemoryWatch
from rl_rollout import Rollout
from rl_rollout.engines import ReplicatedEngine
from rl_rollout.prompts import PromptSource
from rl_trainer_parts.learning.step import LearningParts
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.rollouts.skip_cache import SkipCacheReplay
from rl_trainer_parts.run.folder import RunState
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState(RunState):
    """State of the loop.

    Attributes:
        prompt_source: The prompt source's state.
        unlogged: Metrics of `step` until it is validated and logged; then None.
    """

    prompt_source: Mapping[str, Any] = field(default_factory=dict)
    unlogged: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(LearningParts):
    """Everything that the loop needs.

    Attributes:
        inputs: Tokenizer, prompts, reward.
        engine: The engine, started.
        rollout: Runs the agent loop on the engine.
        replay: Replays stored rollouts, if the settings ask for it.
        source: Order of the training prompts.
        queue: Queue between rollouts and learner.
        teachers: Score rows in the queue, if there are teachers; started.
        transport: Sends weights to the engine.
        stop: Ctrl-C and SIGTERM.
        lifecycle: Events, console, trackers, records and the run's goal.
        on_state: Called with every state from which the run can resume.
        save_checkpoint: Writes a checkpoint.
        memory: Measures memory.
    """

    inputs: Inputs
    engine: ReplicatedEngine
    rollout: Rollout
    replay: SkipCacheReplay
    source: PromptSource
    queue: TransferQueue
    teachers: TeacherService | None
    transport: WeightTransport
    stop: StopSignal
    lifecycle: RunLifecycle
    on_state: Callable[[TrainerState], None]
    save_checkpoint: Callable[[TrainerState], None]
    memory: MemoryWatch

    async def issue(self, prompts: Sequence[Prompt], *, num_sessions: int) -> None:
        """Issue prompts, and notify the teachers, who may be waiting."""
        self.queue.issue(prompts, num_sessions=num_sessions)
        if self.teachers is not None:
            await self.teachers.issued()
