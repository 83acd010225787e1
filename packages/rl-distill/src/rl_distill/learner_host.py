"""Role that runs a learner: reads rows from a queue, publishes weights and writes checkpoints."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rl_core import Batch, TransferQueue
from rl_core.cluster import RoleReport, RoleView, process_report
from rl_core.data import ImageSpan, IntArray, Json
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError
from rl_core.record_fields import settings_record
from rl_core.weights import Canary, ProofTolerances, PublishReport, WeightTransport, WeightUpdate
from rl_distill.checkpoints.store import CheckpointStore, Saved
from rl_distill.learners import Learners

RANK = "rank"
LEASE_WAIT_S = 2.0
LEASE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """Weights packed for the engines.

    Attributes:
        update: Names, digests and locations of the tensors, without the tensors.
        canary: Sequences whose logprobs the engines must reproduce.
        step: The learner's step when the weights were packed.
        pack_s: Packing time in seconds.
        is_live: The engines read the learner's own tensors, or the canary needs the engines' experts, so the weights
            must not change until the update is proven.
    """

    update: WeightUpdate
    canary: Canary
    step: int
    pack_s: float
    is_live: bool = False


@settings_record
class LearnerHostOptions:
    """Options of a learner host.

    Attributes:
        task: The learner's task in the queue.
        saves_in_background: Write checkpoints while training continues.
        ends_with_ranks: Exit the role's process when a rank dies, so that the role and all ranks restart.
        replays: Whether the policy is a mixture of experts whose routing the engines report; see `prove`.
    """

    task: str = "train"
    saves_in_background: bool = True
    ends_with_ranks: bool = False
    replays: bool = False


class LearnerHost:
    """Runs learners in a thread of its own; a subclass defines the training step.

    The subclass sets `learners` and `transport` in the thread before any other call, and `step` after each step.

    Attributes:
        learners: Policy, reference and critic; None until started.
        transport: Packs the weights; None until opened.
        step: Steps taken so far.
    """

    def __init__(
        self,
        queue: TransferQueue,
        canary_sequences: Sequence[IntArray],
        *,
        canary_images: Sequence[tuple[ImageSpan, ...]] = (),
        checkpoints: Path,
        keep: int,
        options: LearnerHostOptions,
    ) -> None:
        """Store the parts; nothing is started.

        Args:
            queue: Queue of the training rows.
            canary_sequences: Token sequences used to prove each weight update.
            canary_images: Images of each of them; empty if none has any.
            checkpoints: Folder of the checkpoints.
            keep: Number of newest checkpoints to keep.
            options: Options of the host.
        """
        self._queue = queue
        self._canary_sequences, self._canary_images = list(canary_sequences), tuple(canary_images)
        self._options = options
        self.learners: Learners | None = None
        self.transport: WeightTransport | None = None
        self.step = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._saved: list[Saved] = []
        self._saved_lock = threading.Lock()
        self._store = CheckpointStore(checkpoints, keep=keep, on_saved=self._note_saved)
        self._doing = "waits for the order to start", time.monotonic()
        self._is_closing = False

    async def save(self, step: int, state: Mapping[str, Json], also_keep: Sequence[int] = ()) -> None:
        """Start a checkpoint of the learners and this state; `saved` returns it once it is complete.

        Args:
            step: Step that names the checkpoint.
            state: The trainer's state.
            also_keep: Steps whose checkpoints are kept beside the newest ones.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        await self._run(partial(self._save, also_keep=also_keep), step, state)

    async def wait_saved(self) -> None:
        """Wait until the checkpoint in progress is complete.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        await self._run(self._store.wait)

    async def saved(self) -> list[Saved]:
        """Return the checkpoints completed since the last call.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        with self._saved_lock:
            found, self._saved = self._saved, []
        return found

    async def export(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Return CPU copies of the policy's tensors by name, and the names that share another's tensor."""
        return await self._run(self._export)

    async def pack(self, version: int | None = None) -> PackedWeights:
        """Pack the current weights as a policy version, for engines to load.

        Args:
            version: The version; None uses `version_after` the finished steps.

        Raises:
            NotReadyError: The learners have not started.
        """
        return await self._run(self._pack, version)

    async def prove(self, canary: Canary, report: PublishReport, tolerances: ProofTolerances) -> PublishReport:
        """Prove the packed weights, which must be unchanged; see `Learners.proven`.

        Raises:
            WeightProofError: A logprob differs by more than the tolerance.
        """
        return await self._run(partial(self._started.proven, tolerances=tolerances), canary, report)

    async def check_alive(self) -> None:
        """Check that every rank is alive; if one died and `ends_with_ranks` is set, exit this process.

        Raises:
            RoleDiedError: A rank died, and `ends_with_ranks` is False.
        """
        await self._run(self._started.check_alive)

    async def report(self) -> RoleView:
        """Return what the role is doing, for `status` and hang diagnosis."""
        doing, since = self._doing
        return RoleView(doing=f"{doing}, for {time.monotonic() - since:.0f} s")

    async def close_others(self) -> None:
        """Close everything that runs outside the thread."""

    async def parts(self, deadline_s: float) -> list[RoleReport]:
        """Return reports of the ranks that have their own processes."""
        if self.learners is None:
            return []
        stacks = await asyncio.to_thread(self.learners.stacks, deadline_s)
        return rank_reports(stacks, asked_s=deadline_s)

    async def close(self) -> None:
        """Finish writing a checkpoint, and end the ranks. Can be called twice."""
        self._is_closing = True
        await self.close_others()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def version_after(self, step: int) -> int:
        """Return the policy version after a step; a subclass may publish less often."""
        return step

    # -- called in the learner's thread

    def rows(self, uids: Sequence[str], *, step: int, deadline_s: float) -> Batch:
        """Return the rows of a step's groups; they stay in the queue until a checkpoint covers the step.

        The lease is released at once. Not every queue notices that a learner died, so a restarted learner would
        otherwise wait until the lease expires. Each wait is short, so that `close` is not delayed by late columns.

        Args:
            uids: Prompt uids of the groups, in order.
            step: Step that trains on them; named in errors.
            deadline_s: Maximum wait in seconds for columns that other roles add, e.g. teachers.

        Raises:
            DeadlineError: The columns did not arrive in time.
            NotReadyError: The host was closed while waiting.
        """
        ends_at = time.monotonic() + deadline_s
        while True:
            left_s = max(ends_at - time.monotonic(), 0.0)
            wait_s = min(left_s, LEASE_WAIT_S)
            try:
                lease = self._queue.lease(self._options.task, prompts=list(uids), deadline_s=wait_s, lease_s=LEASE_S)
                self._queue.release(lease)
                return lease.batch
            except DeadlineError as error:
                if self._is_closing:
                    raise NotReadyError(f"the learner was closed while waiting for the rows of step {step}.") from error
                if left_s <= LEASE_WAIT_S:
                    raise DeadlineError(f"step {step} waited {deadline_s:g} s in total: {error}") from error

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Record the work in progress, such as "trains step 3", for `report`."""
        self._doing = what, time.monotonic()
        try:
            yield
        finally:
            self._doing = "waits for the next order", time.monotonic()

    # -- internal

    def _pack(self, version: int | None) -> PackedWeights:
        started = time.perf_counter()
        version = self.version_after(self.step) if version is None else version
        with self.doing(f"packs the weights of version {version}"):
            learners, transport = self._started, self.transport
            if transport is None:
                raise NotReadyError("the learner has not started.")
            canary = learners.canary(self._canary_sequences, images=self._canary_images, replays=self._options.replays)
            update = learners.pack(transport, version=version, steps_on=True)
        is_live = update.is_sent or canary.logprobs is None
        pack_s = time.perf_counter() - started
        return PackedWeights(update=update, canary=canary, step=self.step, pack_s=pack_s, is_live=is_live)

    def _export(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        policy = self._started.policy
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in policy.export_weights().items()}
        return copies, dict(policy.tied)  # copied, because a validation may keep them while training continues

    def _save(self, step: int, state: Mapping[str, Json], *, also_keep: Sequence[int]) -> None:
        learners, in_background = self._started, self._options.saves_in_background
        with self.doing(f"writes a checkpoint of step {step}"):
            write = partial(learners.save, in_background=in_background)
            self._store.begin(step, state, write, also_keep=also_keep)
            if not in_background:
                self._store.wait()

    def _close(self) -> None:
        self._store.close()
        learners, self.learners = self.learners, None
        if learners is not None:
            learners.close()
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()

    @property
    def _started(self) -> Learners:
        if self.learners is None:
            raise NotReadyError("the learner has not started.")
        return self.learners

    def _note_saved(self, saved: Saved) -> None:
        with self._saved_lock:
            self._saved.append(saved)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except RoleDiedError as error:
            if not self._options.ends_with_ranks:
                raise
            # A rank died, and the others cannot continue without it: restart all of them.
            raise SystemExit(f"the learner host exits: {error}") from error


def rank_reports(stacks: Sequence[str], *, asked_s: float) -> list[RoleReport]:
    """Return a report for each rank that has its own process.

    Args:
        stacks: Stacks of the ranks, in rank order.
        asked_s: Minimum seconds that an unresponsive rank has not answered.
    """
    return [process_report(f"{RANK}[{index}]", stack, asked_s=asked_s) for index, stack in enumerate(stacks)]
