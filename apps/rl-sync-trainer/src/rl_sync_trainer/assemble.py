"""What the synchronous loop works with, and its queue."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rl_core import InProcessQueue, Prompt, TransferQueue
from rl_core.weights import WeightTransport
from rl_distill.teacher import TeacherService
from rl_metrics.reductions import Histogram, MemoryWatch
from rl_metrics.run_files import GenerationSample
from rl_rollout import Rollout
from rl_rollout.engines import RolloutEngine
from rl_rollout.prompts import PromptSource
from rl_trainer_parts.learning.parts import LearningParts
from rl_trainer_parts.reporting.rollout_rows import RolloutWriter
from rl_trainer_parts.reporting.token_probes import TokenProbes
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.rollouts.setup import queue_tasks
from rl_trainer_parts.rollouts.skip_cache import SkipCacheReplay
from rl_trainer_parts.run.checkpoints import TrainerState
from rl_trainer_parts.run.folder import RunFolder
from rl_trainer_parts.run.stopping import StopSignal
from rl_trainer_parts.settings.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(LearningParts):
    """Everything that the loop works with.

    Attributes:
        inputs: Tokenizer, prompts, reward.
        folder: The run's folder.
        engine: Generates; started.
        rollout: Runs the agent loop on the engine.
        replay: Gives stored rollouts in place of new ones, where the settings say so.
        source: Order of the training prompts.
        queue: Between rollouts and learner.
        teachers: Score what is in the queue, where there are any; started.
        transport: Brings weights to the engine.
        stop: Ctrl-C and SIGTERM.
        on_state: Told each state that the run could go on from.
        say: Writes an event, with its name and fields.
        log_metrics: Takes the metrics of a step.
        log_histograms: Takes its distributions.
        log_generations: Takes a table of validation responses, with its step and name.
        save_checkpoint: Writes a checkpoint.
        rollouts: Writes trajectories down; None writes none.
        probes: Asks the policy about tokens; None asks about none.
        memory: Measures memory; None measures none.
        phase: Shows what runs; see `ConsoleTracker.phase`.
    """

    inputs: Inputs
    folder: RunFolder
    engine: RolloutEngine
    rollout: Rollout
    replay: SkipCacheReplay
    source: PromptSource
    queue: TransferQueue
    teachers: TeacherService | None
    transport: WeightTransport
    stop: StopSignal
    on_state: Callable[[TrainerState], None]
    say: Callable[..., None]
    log_metrics: Callable[[int, Mapping[str, float]], None]
    log_generations: Callable[[int, str, Sequence[GenerationSample]], None]
    save_checkpoint: Callable[[TrainerState], None]
    log_histograms: Callable[[int, Mapping[str, Histogram]], None] = lambda *_: None
    rollouts: RolloutWriter | None = None
    probes: TokenProbes | None = None
    memory: MemoryWatch | None = None
    phase: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext()

    async def issue(self, prompts: Sequence[Prompt], *, num_sessions: int) -> None:
        """Issue prompts, and tell the teachers, who may wait for some."""
        self.queue.issue(prompts, num_sessions=num_sessions)
        if self.teachers is not None:
            await self.teachers.issued()


def make_queue(settings: Settings) -> TransferQueue:
    """The queue with the tasks of this run, which get the groups as they were issued: so runs can be repeated."""
    return InProcessQueue(queue_tasks(settings, order="issue"))
