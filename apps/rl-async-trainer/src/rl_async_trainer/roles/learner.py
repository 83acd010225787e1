"""The run's learner: its models, training steps and metrics, and an engine that validates its weights."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from rl_async_trainer.messages import StepOrder, TrainedStep, ValidationBatch
from rl_async_trainer.record import AsyncState
from rl_async_trainer.settings import AsyncSettings
from rl_core import Batch, Prompt, TransferQueue
from rl_core.cluster import RoleView
from rl_core.data import NO_VERSION, IntArray
from rl_core.errors import NotReadyError
from rl_core.weights import TensorTransport, WeightUpdate, check_receipt
from rl_distill.learner_host import LearnerHost, LearnerHostOptions
from rl_distill.learners import Learners
from rl_distill.skipping import SkippedUpdates
from rl_metrics.reductions import Recorder, batch_distributions, summarize_gpus, summarize_staleness
from rl_rollout import Rollout
from rl_rollout.engines import RolloutEngine, engine_class
from rl_rollout.rollouter import PolicyScores, policy_scores
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import replays
from rl_trainer_parts.learning.start_learners import start_learners
from rl_trainer_parts.learning.step import LearningParts, learn
from rl_trainer_parts.reporting.rollout_rows import draft_rollouts
from rl_trainer_parts.reporting.step_metrics import make_memory_watch, summarize_step, with_speeds
from rl_trainer_parts.rollouts.answers import Answer, answers_of
from rl_trainer_parts.rollouts.engines import engine_options
from rl_trainer_parts.rollouts.evaluation import answer_problems
from rl_trainer_parts.rollouts.inputs import read_tokenizer
from rl_trainer_parts.rollouts.setup import TRAIN, make_transport, open_rollout, proof_tolerances
from rl_trainer_parts.run.folder import read_run_state


class RunLearner(LearnerHost):
    """Trains on the requested groups; one per run, whatever its number of ranks.

    Its engine answers validation prompts with its weights of earlier steps; the engine starts on first use.
    """

    def __init__(
        self, settings: AsyncSettings, queue: TransferQueue, canary: Sequence[Prompt], *, folder: Path
    ) -> None:
        """Set the parameters; models load in `start`.

        Args:
            settings: The run's settings.
            queue: Queue with the rows to train on.
            canary: Prompts that prove each weight update.
            folder: The run's folder.
        """
        is_apart = settings.roles.placement != "inline"
        super().__init__(
            queue,
            [prompt.input_ids for prompt in canary],
            canary_images=[prompt.images for prompt in canary],
            checkpoints=folder / "checkpoints",
            keep=settings.trainer.keep_checkpoints,
            options=LearnerHostOptions(
                task=TRAIN,
                saves_in_background=settings.trainer.background_checkpoints,
                ends_with_ranks=is_apart,
                replays=replays(settings),
            ),
        )
        self._settings = settings
        self._folder = folder
        self._parts: LearningParts | None = None
        self._stack = ExitStack()
        self._engine: RolloutEngine | None = None
        self._rollout: Rollout | None = None
        self._held: dict[int, WeightUpdate] = {}
        self._validated: tuple[int, int] | None = None  # step and version of the engine's weights
        self._answering = ""
        # An inline role shares the controller's memory, which has its own watch.
        self._memory = make_memory_watch(settings, "learner") if is_apart else None

    async def start(self, checkpoint: Path | None) -> int:
        """Start the ranks with the weights of a checkpoint or the initial policy; return the number of parameters.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            DataError: The model folder is incomplete.
            DeadlineError: The ranks did not start in time.
        """
        return await self._run(self._start, checkpoint)

    def make_learners(self) -> Learners:
        """The learners, started with the initial policy's weights."""
        return start_learners(self._settings, log_directory=self._folder / "logs")

    def version_after(self, step: int) -> int:
        """Return the policy version after a step, by the run's schedule."""
        return self._settings.schedule_options.version_after(step)

    async def train(self, order: StepOrder) -> TrainedStep:
        """Train one step on these groups; they stay in the queue until a checkpoint contains the step.

        Raises:
            NotReadyError: The step does not follow the last one.
        """
        return await self._run(self._train, order)

    async def expect_engines(self, count: int) -> None:
        """Set the number of engines that receive weights over the network; see `Learners.expect_engines`."""
        if self.learners is not None and self.transport is not None:
            await asyncio.to_thread(self.learners.expect_engines, self.transport, count)

    async def hold(self, step: int, version: int) -> None:
        """Keep the current weights to answer a step's validation, while training continues."""
        tensors, tied = await self.export()
        self._held[step] = TensorTransport().pack(tensors, version=version, tied=tied)

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """Answer validation prompts with the weights held for their step.

        Raises:
            NotReadyError: No weights are held.
        """
        engine, rollout = await self._validation_engine()
        update = self._held.pop(batch.step, None)
        if update is not None:
            check_receipt(update, await engine.update_weights(update), tolerances=proof_tolerances(self._settings))
            self._validated = batch.step, update.version
        elif self._validated is None or batch.step != self._validated[0]:
            raise NotReadyError(f"no weights are held for the validation of step {batch.step}. Call `hold` first.")

        self._answering = f"answers validation batch {batch.number} of step {batch.step}"
        try:
            return answers_of(await answer_problems(self._settings, rollout, batch.prompts), source="learner")
        finally:
            self._answering = ""

    async def probe(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Probe the policy that answered a step's validation.

        Args:
            step: Number of finished steps at that validation.
            sequences: [T] int32 each, tokens of a prompt and a response.
            top_k: Number of alternatives to return per token.

        Raises:
            NotReadyError: The newest validation was another step's.
        """
        if self._engine is None or self._validated is None or step != self._validated[0]:
            raise NotReadyError(f"the last validation here was not that of step {step}.")
        return await policy_scores(self._engine, sequences, top_k, version=self._validated[1])

    async def report(self) -> RoleView:
        """What the role and its validation are doing."""
        view = await super().report()
        return RoleView(doing="; ".join(filter(None, (view.doing, self._answering))), counts=view.counts)

    async def close_others(self) -> None:
        """Close the validation engine. Can be called twice."""
        self._stack.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _validation_engine(self) -> tuple[RolloutEngine, Rollout]:
        if self._engine is None or self._rollout is None:
            settings = self._settings
            options = engine_options(settings, serves_adapter=False)  # `hold` keeps merged weights
            self._engine = engine_class(engine_name(settings))(settings.policy.path, options)
            await self._engine.start()
            self._rollout = self._stack.enter_context(open_rollout(settings, read_tokenizer(settings), self._engine))
        return self._engine, self._rollout

    # -- in the learner's thread

    def _start(self, checkpoint: Path | None) -> int:
        settings = self._settings
        with self.doing("starts its ranks"):
            learners = self.learners = self.make_learners()
            if checkpoint is not None:
                learners.load(checkpoint)
                self.step = read_run_state(checkpoint, AsyncState).step
            if settings.distillation.needs_hidden:
                learners.load_teacher_heads([t.model for t in settings.distillation.teachers.values()])
        self._parts = LearningParts(
            settings=settings,
            learners=learners,
            skipped=SkippedUpdates(most=settings.trainer.max_skipped_updates, directory=self._folder / "skipped"),
        )
        self.transport = make_transport(
            settings, is_in_process=settings.roles.placement == settings.rollout.placement == "inline"
        )
        return learners.policy.num_parameters

    def _train(self, order: StepOrder) -> TrainedStep:
        parts, settings, step = self._parts, self._settings, order.step
        if parts is None:
            raise NotReadyError("the learner has not been started.")
        if step != self.step + 1:
            raise NotReadyError(f"the learner has finished step {self.step} and cannot train step {step} next.")
        recorder = Recorder(strict=settings.metrics.strict)
        with self.doing(f"waits for the groups of step {step}"), recorder.timer("wait_rollouts"):
            rows = self.rows(order.uids, step=step, deadline_s=order.deadline_s)
        started = time.perf_counter()
        with self.doing(f"trains step {step}"):
            batch, kl_state = learn(parts, rows, recorder, step=step, kl_state=order.kl)
        self.step = step
        busy_s = time.perf_counter() - started
        self._record(recorder, batch, order, busy_s=busy_s)
        return TrainedStep(
            metrics=with_speeds(settings, recorder.reduce(), batch),
            num_trajectories=len(batch),
            kl=kl_state,
            busy_s=busy_s,
            rollouts=draft_rollouts(settings, batch, step=step, version=order.version),
            histograms={name: histogram.to_json() for name, histogram in recorder.histograms().items()},
        )

    def _record(self, recorder: Recorder, batch: Batch, order: StepOrder, *, busy_s: float) -> None:
        num_tokens = len(batch.ragged("input_ids").values)
        if self._settings.metrics.has_details(order.step):
            recorder.record_distributions(batch_distributions(batch))
        recorder.record_all(
            {
                **summarize_step(self._settings, batch, version=order.version, step_s=busy_s),
                **_staleness(batch, order.version),
                "perf/trainer_tokens_per_s": num_tokens / max(busy_s, 1e-9),
                **({} if self.learners is None else summarize_gpus("perf", self.learners.gpu_use())),
                **({} if self._memory is None else self._memory.step(self.step)),
            }
        )


def _staleness(batch: Batch, version: int) -> dict[str, float]:
    """Staleness of each trajectory's tokens against the weights that train on them."""
    versions = [row[row != NO_VERSION] for row in batch.ragged("policy_versions")]
    sampled = [index for index, row in enumerate(versions) if len(row)]
    if not sampled:
        return {}
    oldest, newest = (np.asarray([bound(versions[index]) for index in sampled]) for bound in (np.min, np.max))
    return summarize_staleness(oldest, newest, policy_version=version, group_index=batch.group_index()[sampled])
