"""One launch of a run: start the parts, train, and leave a folder that can be resumed."""

from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_core import InProcessQueue
from rl_core.terminal_text import counted
from rl_distill.learners import Learners
from rl_distill.skipping import SkippedUpdates
from rl_distill.teacher import TeacherService
from rl_metrics.trackers import ConsoleTracker
from rl_rollout.engines import ReplicatedEngine
from rl_rollout.prompts import PromptSource
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_sync_trainer.loop import train
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import learner_name
from rl_trainer_parts.learning.start_learners import describe_parameters, start_learners
from rl_trainer_parts.learning.teachers import make_teachers
from rl_trainer_parts.reporting.step_metrics import make_memory_watch
from rl_trainer_parts.rollouts.engines import make_engine
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.rollouts.setup import make_transport, open_rollout, queue_tasks
from rl_trainer_parts.rollouts.skip_cache import SkipCacheReplay
from rl_trainer_parts.run.folder import RunFolder, read_run_state
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal
from rl_trainer_parts.settings.schema import Settings


class LearnerRun:
    """One launch of a run that trains a policy, in a folder that this process has locked."""

    def __init__(self, settings: Settings, inputs: Any, folder: RunFolder, console: ConsoleTracker) -> None:
        """Set the parameters; models load in `run`."""
        self._settings = settings
        self._inputs: Any = inputs
        self._folder = folder
        self._console = console
        self._state = TrainerState()
        self._lifecycle = RunLifecycle(settings, folder, console, inputs.tokenizer)

    def _start_learners(self, stack: AsyncExitStack, checkpoint: Path | None) -> Learners:
        settings, console = self._settings, self._console
        with console.phase(f"starting {learner_name(settings)} learner"):
            # Built from the initial policy, whose tokenizer every checkpoint copies; the checkpoint may be pruned.
            learners = start_learners(settings, log_directory=self._folder.path / "logs")
            stack.callback(learners.close)
            stack.callback(self._lifecycle.store.close)
            if checkpoint is not None:
                learners.load(checkpoint)
        console.say(f"learner: {describe_parameters(settings, learners.policy.num_parameters)}")
        return learners

    def _save(self, state: TrainerState, learners: Learners) -> None:
        in_background = self._settings.trainer.background_checkpoints
        content = asdict(replace(state, wall_s=self._lifecycle.wall_s))
        write = partial(learners.save, in_background=in_background)
        self._lifecycle.store.begin(state.step, content, write, also_keep=self._lifecycle.goal.kept)
        if not in_background:
            self._lifecycle.store.wait()

    def _save_stopped(self, learners: Learners) -> None:
        self._lifecycle.store.wait()
        if self._state.step in self._lifecycle.store.steps():
            return
        with self._console.phase(f"stopping: writing a checkpoint of step {self._state.step}"):
            self._save(self._state, learners)
            self._lifecycle.store.wait()


class TrainingRun(LearnerRun):
    """One launch of a run with rollouts."""

    _inputs: Inputs

    async def run(self) -> int:
        """Train until the last step or a signal; return the exit status. See `RunLifecycle.launch`."""
        return await self._lifecycle.launch(self._train, lambda: self._state)

    async def _train(self, stack: AsyncExitStack, stop: StopSignal) -> None:
        settings, console = self._settings, self._console
        checkpoint = self._lifecycle.find_checkpoint()
        source = PromptSource(self._inputs.train, seed=settings.run.seed)
        if checkpoint is not None:
            self._state = read_run_state(checkpoint, TrainerState)
            self._lifecycle.resumes(checkpoint, self._state)
            source.restore(self._state.prompt_source)
            if self._state.unlogged is None and self._lifecycle.says_done(self._state):
                return
        else:
            self._state = replace(self._state, prompt_source=source.state())
        learners = self._start_learners(stack, checkpoint)
        stop.check()
        # The learner's weights are published to it later.
        engine = make_engine(settings, settings.policy.path, log_directory=self._folder.path / "logs")
        stack.push_async_callback(engine.close)
        with console.phase(f"starting {engine_name(settings)} engine"):
            await stop.run(
                engine.start(),
                what=f"{engine_name(settings)} engine to start (rollout.start_deadline_s)",
                deadline_s=settings.rollout.start_deadline_s,
            )
        console.say(f"engine: {engine.traits.name}")
        if settings.rollout.offload_engine and not engine.traits.can_sleep:
            console.say("engine: it cannot sleep on this platform, so it keeps its memory while the learner trains")
        teachers = await self._start_teachers(stack, learners, stop)
        parts = self._assemble(stack, learners, engine, source, stop, teachers=teachers)
        self._lifecycle.begins(self._state)
        try:
            await train(parts, self._state)
            self._lifecycle.store.wait()
        except StopRequestedError:
            self._save_stopped(learners)
            raise

    async def _start_teachers(
        self, stack: AsyncExitStack, learners: Learners, stop: StopSignal
    ) -> TeacherService | None:
        settings = self._settings
        distillation = settings.distillation
        teachers = make_teachers(settings, log_directory=self._folder.path / "logs", say=self._lifecycle.say)
        if teachers is None:
            return None
        stack.push_async_callback(teachers.close)
        with self._console.phase(f"starting {counted(len(distillation.teachers), 'teacher')}"):
            await stop.run(teachers.start(), what="teachers to start", deadline_s=3 * distillation.start_deadline_s)
        if distillation.needs_hidden:
            learners.load_teacher_heads([teacher.model for teacher in distillation.teachers.values()])
        self._console.say(f"teachers: {', '.join(distillation.teachers)}")
        return teachers

    def _assemble(
        self,
        stack: AsyncExitStack,
        learners: Learners,
        engine: ReplicatedEngine,
        source: PromptSource,
        stop: StopSignal,
        *,
        teachers: TeacherService | None,
    ) -> Parts:
        settings = self._settings
        queue = InProcessQueue(queue_tasks(settings, order="issue"))  # so that runs are repeatable
        stack.callback(queue.close)
        transport = make_transport(settings)
        stack.callback(transport.close)
        return Parts(
            settings=settings,
            inputs=self._inputs,
            learners=learners,
            engine=engine,
            rollout=stack.enter_context(open_rollout(settings, self._inputs.tokenizer, engine)),
            replay=SkipCacheReplay(settings, self._inputs.tokenizer, say=self._lifecycle.say),
            source=source,
            queue=queue,
            teachers=teachers,
            transport=transport,
            skipped=SkippedUpdates(most=settings.trainer.max_skipped_updates, directory=self._folder.path / "skipped"),
            stop=stop,
            lifecycle=self._lifecycle,
            on_state=self._keep_state,
            save_checkpoint=lambda state: self._save(state, learners),
            memory=make_memory_watch(settings, "trainer", say=self._lifecycle.say),
        )

    def _keep_state(self, state: TrainerState) -> None:
        self._state = state
