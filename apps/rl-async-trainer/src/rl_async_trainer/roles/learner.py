"""The learner's side in a role of its own: policy, reference and critic; steps, weights to publish, checkpoints."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_async_trainer.messages import PackedWeights, ProbeOrder, StepOrder, TrainedStep, ValidationBatch
from rl_async_trainer.roles.learner_validation import LearnerValidation
from rl_async_trainer.schedule.run_state import AsyncState
from rl_async_trainer.settings import AsyncSettings
from rl_core import Batch, TransferQueue
from rl_core.cluster.role_report import RoleReport, RoleView, Wait, process_report
from rl_core.data.records import NO_VERSION, IntArray, Json
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError
from rl_core.weights.transports import TensorTransport
from rl_core.weights.update import WeightTransport
from rl_distill.checkpoints.store import CheckpointStore, Saved
from rl_distill.learners import Learners
from rl_distill.skipping import SkippedUpdates
from rl_metrics.reductions.async_training import summarize_staleness
from rl_metrics.reductions.recorder import Recorder
from rl_rollout.rollouter.served_policy import PolicyScores
from rl_trainer.learning.objective import make_kl_control, make_objective, make_selection
from rl_trainer.learning.parts import LearningParts
from rl_trainer.learning.start_learners import start_learners
from rl_trainer.learning.step import learn
from rl_trainer.reporting.rollout_rows import draft_rollouts
from rl_trainer.reporting.speeds import with_speeds
from rl_trainer.reporting.step_metrics import has_distributions, make_memory_watch, record_distributions, summarize_step
from rl_trainer.rollouts.answers import Answer
from rl_trainer.rollouts.setup import TRAIN, make_transport
from rl_trainer.run.checkpoints import read_run_state

CONTROLLER, RANK = "controller", "rank"
LEASE_WAIT_S = 2.0
LEASE_S = 10.0

T = TypeVar("T")


class LearnerHost:
    """Trains on the groups that it is told to, one call at a time; one for a run, whatever ranks it has."""

    def __init__(
        self,
        settings: AsyncSettings,
        queue: TransferQueue,
        canary_sequences: Sequence[IntArray],
        *,
        folder: Path,
    ) -> None:
        """Name what is needed; nothing heavy starts before `start`.

        Args:
            settings: Of the run.
            queue: Has what is trained on.
            canary_sequences: What proves each weight update.
            folder: The run's.
        """
        self._settings = settings
        self._queue = queue
        self._canary_sequences = list(canary_sequences)
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._parts: LearningParts | None = None
        self._close_learners: Callable[[], None] = _nothing
        self._transport: WeightTransport | None = None
        self._saved: list[Saved] = []
        self._saved_lock = threading.Lock()
        self._store = CheckpointStore(
            folder / "checkpoints", keep=settings.trainer.keep_checkpoints, on_saved=self._note_saved
        )
        self._doing = Wait(what="the order to start", on=CONTROLLER, since_s=time.monotonic())
        self._validator = LearnerValidation(settings)
        is_apart = settings.roles.kind != "inline"  # else its memory is the controller's, which has its own watch
        self._memory = make_memory_watch(settings, "learner") if is_apart else None
        self._step = 0
        self._is_closing = False

    async def start(self, checkpoint: Path | None) -> int:
        """Start the ranks, with the weights of a checkpoint or of the initial policy; gives the number of parameters.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            DataError: The model's folder lacks something.
            DeadlineError: The ranks were not there in time.
        """
        return await self._run(self._start, checkpoint)

    def make_learners(self) -> Learners:
        """The learners of the settings, started, with the weights of the initial policy."""
        return start_learners(self._settings, log_directory=self._folder / "logs")

    async def train(self, order: StepOrder) -> TrainedStep:
        """One step on these groups; they stay in the queue until a checkpoint has it.

        Raises:
            NotReadyError: It is not the step after the last.
        """
        return await self._run(self._train, order)

    async def pack(self, version: int | None) -> PackedWeights:
        """The present weights as a policy version, ready for engines to take.

        Args:
            version: What they are called; None names them by the steps that were done.
        """
        return await self._run(self._pack, version)

    async def save(self, step: int, state: Mapping[str, Json]) -> None:
        """Begin a checkpoint, which is written while training goes on; `saved` says when it is whole.

        Raises:
            CheckpointError: The one before could not be written.
        """
        await self._run(self._save, step, state)

    async def wait_saved(self) -> None:
        """Wait until what was begun is whole.

        Raises:
            CheckpointError: It could not be written.
        """
        await self._run(self._store.wait)

    async def saved(self) -> list[Saved]:
        """Checkpoints that became whole since the last call.

        Raises:
            CheckpointError: The last one that was begun could not be written.
        """
        with self._saved_lock:
            found, self._saved = self._saved, []
        return found

    async def hold(self, step: int, version: int) -> None:
        """Keep the weights of now for the validation of a step."""
        await self._validator.hold(step, version=version, export=lambda: self._run(self._export))

    async def validate(self, batch: ValidationBatch) -> list[Answer]:
        """Answer validation problems with the weights that are held for their step.

        Raises:
            NotReadyError: None are held.
        """
        return await self._validator.answer(batch)

    async def probe(self, order: ProbeOrder) -> PolicyScores:
        """What the policy of the newest validation thinks of tokens.

        Raises:
            NotReadyError: That was another step's.
        """
        return await self._validator.probe(order)

    async def report(self) -> RoleView:
        """What it does, for `status`, and for who looks for the reason of a hang."""
        doing, now = self._doing, time.monotonic()
        since_s = now - doing.since_s
        waits = self._validator.waits(now)
        if doing.on and not (waits and doing.on == CONTROLLER):  # which waits for the validation
            waits = (replace(doing, since_s=since_s), *waits)
        if not doing.on and self._settings.cluster.kind != "inline":
            waits = (replace(doing, on=RANK, since_s=since_s), *waits)
        return RoleView(doing="" if doing.on else f"works on {doing.what}, for {since_s:.0f} s", waits=waits)

    async def parts(self, deadline_s: float) -> list[RoleReport]:
        """What the ranks do that have processes of their own."""
        if self._parts is None:
            return []
        stacks = await asyncio.to_thread(self._parts.learners.stacks, deadline_s)
        return rank_reports(stacks, asked_s=deadline_s)

    async def close(self) -> None:
        """Write the end of a checkpoint that was begun, and end the ranks. Can be called twice."""
        self._is_closing = True
        await self._validator.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # -- in the learner's thread

    def _start(self, checkpoint: Path | None) -> int:
        settings = self._settings
        with self._does("its ranks to start"):
            learners = self.make_learners()
            self._close_learners = learners.close
            if checkpoint is not None:
                learners.load(checkpoint)
                self._step = read_run_state(checkpoint, AsyncState).step
            if settings.distillation.needs_hidden:
                learners.load_teacher_heads([t.model for t in settings.distillation.teachers.values()])
        self._parts = LearningParts(
            settings=settings,
            learners=learners,
            objective=make_objective(settings),
            kl=make_kl_control(settings),
            select_tokens=make_selection(settings),
            skipped=SkippedUpdates(most=settings.trainer.max_skipped_updates, directory=self._folder / "skipped"),
        )
        self._transport = make_transport(
            settings, is_in_process=settings.roles.kind == settings.rollout.placement == "inline"
        )
        return learners.policy.num_parameters

    def _train(self, order: StepOrder) -> TrainedStep:
        parts, settings, step = self._started, self._settings, order.step
        if step != self._step + 1:
            raise NotReadyError(f"the learner has done {self._step} steps, and was told to train step {step}.")
        recorder = Recorder(strict=settings.metrics.strict)
        with (
            self._does(f"the {len(order.uids)} groups of step {step}", on="groups"),
            recorder.timer("wait_rollouts"),
        ):
            rows = self._rows(order)
        started = time.perf_counter()
        with self._does(f"step {step}"):
            batch, kl_state = learn(parts, rows, recorder, step=step, kl_state=order.kl)
        self._step = step
        busy_s = time.perf_counter() - started
        self._record(recorder, batch, order, busy_s=busy_s)
        return TrainedStep(
            metrics=with_speeds(settings, recorder.reduce(), batch),
            num_trajectories=len(batch),
            kl=kl_state,
            busy_s=busy_s,
            rollouts=draft_rollouts(settings, batch, step=step, version=order.version),
            histograms={name: one.to_json() for name, one in recorder.histograms().items()},
        )

    def _rows(self, order: StepOrder) -> Batch:
        """The groups of a step, which nobody else asks for, and which stay in the queue until a checkpoint has them.

        They are given back at once: not every queue notices when the learner dies, and it would wait for itself until
        its lease runs out. It waits a little at a time, so that a run that ends need not wait for late columns.
        """
        ends_at = time.monotonic() + order.deadline_s
        while True:
            left_s = max(ends_at - time.monotonic(), 0.0)
            wait_s = min(left_s, LEASE_WAIT_S)
            try:
                lease = self._queue.lease(TRAIN, prompts=list(order.uids), deadline_s=wait_s, lease_s=LEASE_S)
                self._queue.release(lease)
                return lease.batch
            except DeadlineError as error:
                if self._is_closing:
                    raise NotReadyError(f"the learner was closed while it waited for step {order.step}.") from error
                if left_s <= LEASE_WAIT_S:
                    raise DeadlineError(f"step {order.step} waited {order.deadline_s:g} s in all: {error}") from error

    def _record(self, recorder: Recorder, batch: Batch, order: StepOrder, *, busy_s: float) -> None:
        num_tokens = len(batch.ragged("input_ids").values)
        if has_distributions(self._settings, order.step):
            record_distributions(batch, recorder)
        recorder.record_all(
            {
                **summarize_step(self._settings, batch, version=order.version, step_s=busy_s),
                **_staleness(batch, order.version),
                "perf/trainer_tokens_per_s": num_tokens / max(busy_s, 1e-9),
                **({} if self._memory is None else self._memory.step(self._step)),
            }
        )

    def _pack(self, version: int | None) -> PackedWeights:
        started = time.perf_counter()
        version = self._settings.schedule_options.version_after(self._step) if version is None else version
        with self._does(f"the weights of version {version}"):
            policy, transport = self._started.learners.policy, self._transport
            if transport is None:
                raise NotReadyError("the learner has not been started.")
            canary = self._started.learners.canary(self._canary_sequences)
            tensors = policy.export_weights()
            if isinstance(transport, TensorTransport):  # the next step must not change what an engine is taking
                tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            packed = transport.pack(tensors, version=version, tied=policy.tied)
        is_live = packed.broadcast is not None
        pack_s = time.perf_counter() - started
        return PackedWeights(update=packed, canary=canary, step=self._step, pack_s=pack_s, is_live=is_live)

    def _export(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        policy = self._started.learners.policy
        return {name: tensor.detach().clone() for name, tensor in policy.export_weights().items()}, dict(policy.tied)

    def _save(self, step: int, state: Mapping[str, Json]) -> None:
        learners, in_background = self._started.learners, self._settings.trainer.background_checkpoints
        with self._does(f"a checkpoint of step {step}"):
            self._store.begin(step, state, lambda folder: learners.save(folder, in_background=in_background))
            if not in_background:
                self._store.wait()

    def _close(self) -> None:
        self._store.close()
        close, self._close_learners = self._close_learners, _nothing
        close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    @property
    def _started(self) -> LearningParts:
        if self._parts is None:
            raise NotReadyError("the learner has not been started.")
        return self._parts

    @contextmanager
    def _does(self, what: str, on: str = "") -> Any:
        """Note what the learner does, while it does it."""
        self._doing = Wait(what=what, on=on, since_s=time.monotonic())
        try:
            yield
        finally:
            self._doing = Wait(what="the next order", on=CONTROLLER, since_s=time.monotonic())

    def _note_saved(self, saved: Saved) -> None:
        with self._saved_lock:
            self._saved.append(saved)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except RoleDiedError as error:  # a rank, without which the others cannot go on: all start again
            if self._settings.roles.kind == "inline":
                raise
            raise SystemExit(f"the learner host ends, as {error}") from error


def rank_reports(stacks: Sequence[str], *, asked_s: float) -> list[RoleReport]:
    """Each rank that has a process of its own.

    Args:
        stacks: In the order of ranks.
        asked_s: How long one that does not answer has not, at least.
    """
    return [process_report(f"{RANK}[{index}]", stack, asked_s=asked_s) for index, stack in enumerate(stacks)]


def _staleness(batch: Batch, version: int) -> dict[str, float]:
    """How far the tokens of each trajectory are behind the weights that it trains."""
    sampled = [row[row != NO_VERSION] for row in batch.ragged("policy_versions")]
    rows = [index for index, row in enumerate(sampled) if len(row)]
    if not rows:
        return {}
    oldest = np.asarray([sampled[index].min() for index in rows])
    newest = np.asarray([sampled[index].max() for index in rows])
    groups = batch.group_index()[rows]
    return summarize_staleness(oldest, newest, policy_version=version, group_index=groups)


def _nothing() -> None:
    """Nothing was started."""
