"""A run's learners as a role: rows by name from a queue, weights to publish, checkpoints; one call at a time."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rl_core import Batch, TransferQueue
from rl_core.cluster import RoleReport, RoleView, Wait, process_report
from rl_core.data import IntArray, Json
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError
from rl_core.record_fields import settings_record
from rl_core.weights import (
    Canary,
    ProofTolerances,
    PublishReport,
    WeightTransport,
    WeightUpdate,
)
from rl_distill.checkpoints.store import CheckpointStore, Saved
from rl_distill.learners import Learners

RANK = "rank"
LEASE_WAIT_S = 2.0
LEASE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """Weights on their way to the engines.

    Attributes:
        update: Names, digests and where the tensors are; no tensor itself.
        canary: What must come out.
        step: Steps that the learner had done.
        pack_s: Seconds that it took.
        is_live: The engines take the learner's own tensors, or the canary waits for their experts: the weights must not
            change until the update is proven.
    """

    update: WeightUpdate
    canary: Canary
    step: int
    pack_s: float
    is_live: bool = False


@settings_record
class LearnerHostOptions:
    """How a learner host works.

    Attributes:
        task: Its task in the queue.
        caller: The role that gives it orders, for reports.
        saves_in_background: Checkpoints are written while training goes on.
        has_ranks: Its ranks have processes of their own.
        ends_with_ranks: The process of the role ends when a rank has died, so that all start again.
        replays: The policy is a mixture whose experts the engines tell: see `prove`.
    """

    task: str = "train"
    caller: str = "controller"
    saves_in_background: bool = True
    has_ranks: bool = False
    ends_with_ranks: bool = False
    replays: bool = False


class LearnerHost:
    """Holds learners and works in its own thread; a subclass defines the step.

    `learners` and `transport` are set in the thread before anything else is asked, and `step` after each step.

    Attributes:
        learners: Policy, reference and critic; None before they are started.
        transport: Packs weights; None before it is opened.
        step: Steps done.
    """

    def __init__(
        self,
        queue: TransferQueue,
        canary_sequences: Sequence[IntArray],
        *,
        checkpoints: Path,
        keep: int,
        options: LearnerHostOptions,
    ) -> None:
        """Nothing is started.

        Args:
            queue: Has what is trained on.
            canary_sequences: What proves each weight update.
            checkpoints: Where checkpoints lie.
            keep: How many of the newest to keep.
            options: How it works.
        """
        self._queue = queue
        self._canary_sequences = list(canary_sequences)
        self._options = options
        self.learners: Learners | None = None
        self.transport: WeightTransport | None = None
        self.step = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._saved: list[Saved] = []
        self._saved_lock = threading.Lock()
        self._store = CheckpointStore(checkpoints, keep=keep, on_saved=self._note_saved)
        self._doing = self._since("the order to start", on=options.caller)
        self._is_closing = False

    async def save(self, step: int, state: Mapping[str, Json]) -> None:
        """Begin a checkpoint, which is written while training goes on; `saved` says when it is complete.

        Raises:
            CheckpointError: The one before could not be written.
        """
        await self._run(self._save, step, state)

    async def wait_saved(self) -> None:
        """Wait until what was begun is complete.

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

    async def export(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """A copy of the policy's tensors by name, and which names are tied to others."""
        return await self._run(self._export)

    async def prove(self, canary: Canary, report: PublishReport, tolerances: ProofTolerances) -> PublishReport:
        """See `Learners.proven`; the weights must be those that were packed.

        Raises:
            WeightProofError: A logprob differs by more than the tolerance.
        """
        return await self._run(partial(self._started.proven, tolerances=tolerances), canary, report)

    async def look(self) -> None:
        """Detect the death of a rank, with which this role ends where it is to end with its ranks.

        Raises:
            RoleDiedError: A rank died, and this role does not end with it.
        """
        await self._run(self._started.look)

    async def report(self) -> RoleView:
        """What it does, for `status` and hang diagnosis."""
        doing, waits = self._doing, self.other_waits()
        since_s = time.monotonic() - doing.since_s
        if doing.on and not (waits and doing.on == self._options.caller):  # which waits for the others
            waits = (replace(doing, since_s=since_s), *waits)
        if not doing.on and self._options.has_ranks:
            waits = (replace(doing, on=RANK, since_s=since_s), *waits)
        return RoleView(doing="" if doing.on else f"works on {doing.what}, for {since_s:.0f} s", waits=waits)

    def other_waits(self) -> tuple[Wait, ...]:
        """What is waited for beside the thread's work."""
        return ()

    async def close_others(self) -> None:
        """Close what works beside the thread."""

    async def parts(self, deadline_s: float) -> list[RoleReport]:
        """What the ranks do that have processes of their own."""
        if self.learners is None:
            return []
        stacks = await asyncio.to_thread(self.learners.stacks, deadline_s)
        return rank_reports(stacks, asked_s=deadline_s)

    async def close(self) -> None:
        """Write the end of a checkpoint that was begun, and end the ranks. Can be called twice."""
        self._is_closing = True
        await self.close_others()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # -- in the learner's thread

    def rows(self, uids: Sequence[str], *, step: int, deadline_s: float) -> Batch:
        """The groups of a step, which nobody else asks for, and which stay in the queue until a checkpoint has them.

        They are returned at once: not every queue notices when the learner dies, and it would wait for itself until
        its lease runs out. It waits a little at a time, so that a run that ends need not wait for late columns.

        Args:
            uids: The groups, in order.
            step: That trains them.
            deadline_s: Longest wait for columns that others give, such as teachers.

        Raises:
            DeadlineError: They did not come.
            NotReadyError: This was closed meanwhile.
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
                    raise NotReadyError(f"the learner was closed while it waited for step {step}.") from error
                if left_s <= LEASE_WAIT_S:
                    raise DeadlineError(f"step {step} waited {deadline_s:g} s in all: {error}") from error

    def pack_weights(self, version: int) -> PackedWeights:
        """The present weights as a policy version, ready for engines to take.

        Raises:
            NotReadyError: There are no learners yet.
        """
        started = time.perf_counter()
        with self.doing(f"the weights of version {version}"):
            learners, transport = self._started, self.transport
            if transport is None:
                raise NotReadyError("the learner has not been started.")
            canary = learners.canary(self._canary_sequences, replays=self._options.replays)
            packed = learners.pack(transport, version=version, steps_on=True)
        is_live = packed.is_sent or canary.logprobs is None
        pack_s = time.perf_counter() - started
        return PackedWeights(update=packed, canary=canary, step=self.step, pack_s=pack_s, is_live=is_live)

    @contextmanager
    def doing(self, what: str, on: str = "") -> Iterator[None]:
        """Note what the learner does, or what it waits for and from whom, while it does it."""
        self._doing = self._since(what, on=on)
        try:
            yield
        finally:
            self._doing = self._since("the next order", on=self._options.caller)

    # -- inside

    @staticmethod
    def _since(what: str, *, on: str) -> Wait:
        """Since now, on the monotonic clock."""
        return Wait(what=what, on=on, since_s=time.monotonic())

    def _export(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        policy = self._started.policy
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in policy.export_weights().items()}
        return copies, dict(policy.tied)  # kept for as long as a validation waits

    def _save(self, step: int, state: Mapping[str, Json]) -> None:
        learners, in_background = self._started, self._options.saves_in_background
        with self.doing(f"a checkpoint of step {step}"):
            self._store.begin(step, state, lambda folder: learners.save(folder, in_background=in_background))
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
            raise NotReadyError("the learner has not been started.")
        return self.learners

    def _note_saved(self, saved: Saved) -> None:
        with self._saved_lock:
            self._saved.append(saved)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except RoleDiedError as error:  # a rank, without which the others cannot go on: all start again
            if not self._options.ends_with_ranks:
                raise
            raise SystemExit(f"the learner host ends, as {error}") from error


def rank_reports(stacks: Sequence[str], *, asked_s: float) -> list[RoleReport]:
    """Each rank that has a process of its own.

    Args:
        stacks: In the order of ranks.
        asked_s: How long one that does not answer has not, at least.
    """
    return [process_report(f"{RANK}[{index}]", stack, asked_s=asked_s) for index, stack in enumerate(stacks)]
