# ruff: noqa: S101 - a test suite that other packages import: its assertions are its purpose
"""What every check of a transfer queue stands on."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from rl_core.data.columns import COLUMNS, ColumnSpec, declare_column
from rl_core.data.records import NO_VERSION, Trajectory
from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.testing.clock import FakeClock, wait_until
from rl_core.testing.rows import make_prompts, make_trajectory

Result = TypeVar("Result")

DEADLINE_S = 20.0
"""For what must happen: long, so that a busy machine fails no check."""

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids", "reward"}))
TRAIN_IN_ORDER = TaskSpec(name="train", needs=frozenset({"input_ids", "reward"}), order="issue")
REFERENCE = TaskSpec(name="reference", needs=frozenset({"input_ids"}), gives=frozenset({"reference_logprobs"}))
TEACHER = TaskSpec(name="teacher", needs=frozenset({"input_ids"}), gives=frozenset({"teacher_logprobs"}))
TRAIN_LATE = TaskSpec(name="train", needs=frozenset({"input_ids", "reference_logprobs"}))

LARGE = 20_000
"""Tokens of a row whose columns are larger than what any backend sends inline."""

TOP_K = 4
OWN = {
    "own_top_logprobs": ColumnSpec(dtype="float32", is_ragged=True, meaning="The teacher's largest logprobs."),
    "own_top_ids": ColumnSpec(dtype="int32", is_ragged=True, meaning="The tokens of these."),
    "own_embedding": ColumnSpec(dtype="float16", is_ragged=False, meaning="A few numbers of each row."),
}
"""Columns of a program's own, which `declared` declares for one check."""


class QueueChecks:
    """A queue for each check, closed after it, with a clock that stands still and threads that end."""

    def make_queue(
        self, tasks: Sequence[TaskSpec], *, options: QueueOptions, clock: Callable[[], float]
    ) -> TransferQueue:
        """The queue under test; the one method that a backend's test class writes."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Called by pytest before each check."""
        self.clock = FakeClock()
        self._queues: list[TransferQueue] = []
        self._threads = ThreadPoolExecutor(max_workers=16)

    def teardown_method(self) -> None:
        """Called by pytest after each check; closing wakes threads that a failed check left waiting."""
        for queue in self._queues:
            queue.close()
        self._threads.shutdown()

    def queue(self, *tasks: TaskSpec, **options: Any) -> TransferQueue:
        """A new queue with these tasks, or with TRAIN."""
        queue = self.make_queue(tasks or (TRAIN,), options=QueueOptions(**options), clock=self.clock)
        self._queues.append(queue)
        return queue

    def filled(self, *tasks: TaskSpec, num_prompts: int, num_sessions: int = 1) -> TransferQueue:
        """A queue with whole groups of prompts p0, p1 and so on."""
        queue = self.queue(*tasks)
        queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)
        for prompt in make_prompts(num_prompts):
            put_all(queue, prompt.uid, num_sessions=num_sessions)
        return queue

    def full(self, *, num_prompts: int = 3) -> TransferQueue:
        """A queue for two rows, both of them there."""
        queue = self.queue(TRAIN, capacity_rows=2)
        queue.issue(make_prompts(num_prompts), num_sessions=1)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        return queue

    def advance(self, queue: TransferQueue, seconds: float) -> None:
        """Let time pass, and let the queue look at its clock."""
        self.clock.advance(seconds)
        queue.stats()

    def spawn(self, call: Callable[..., Result], *args: Any, **kwargs: Any) -> "Future[Result]":
        """Run a call in a thread."""
        return self._threads.submit(call, *args, **kwargs)

    def wait_for_stat(self, queue: TransferQueue, name: str, value: float) -> None:
        """Wait until the queue says so, such as that a thread waits in it."""
        wait_until(lambda: queue.stats()[name] == value, f"{name} to be {value:g}", deadline_s=DEADLINE_S)


def put_all(queue: TransferQueue, prompt_uid: str, *, num_sessions: int = 1) -> None:
    """Put one trajectory for every session of a prompt."""
    for session in range(num_sessions):
        queue.put(prompt_uid, session, [make_trajectory(prompt_uid, session)], deadline_s=DEADLINE_S)


def put_large(queue: TransferQueue, uid: str, session: int = 0, *, deadline_s: float = DEADLINE_S) -> None:
    """Put a large row whose tokens name its prompt."""
    row = make_trajectory(uid, session, num_response_tokens=LARGE)
    row.input_ids[:] = int(uid[1:])
    queue.put(uid, session, [row], deadline_s=deadline_s)


def sampled_by(prompt_uid: str, session_index: int, *versions: int, output_index: int = 0) -> Trajectory:
    """A trajectory with one token of each of these policy versions."""
    return make_trajectory(
        prompt_uid,
        session_index,
        output_index,
        num_response_tokens=len(versions),
        policy_versions=np.asarray([NO_VERSION, NO_VERSION, *versions], dtype=np.int32),
    )


@contextmanager
def declared() -> Iterator[None]:
    """Declare columns for one check."""
    for name, spec in OWN.items():
        declare_column(name, spec)
    try:
        yield
    finally:
        for name in OWN:
            COLUMNS.pop(name, None)


def uids_of(lease: Any) -> list[str]:
    """Leased prompts by uid, in the lease's order."""
    return [prompt.uid for prompt in lease.prompts]


def states_of(queue: TransferQueue) -> list[str]:
    """The state of each prompt, in the order of issue."""
    return [entry.state for entry in queue.ledger()]


@contextmanager
def refuses(error: type[Exception], *words: str) -> Iterator[None]:
    """Expect an error whose message has all these words."""
    message = None
    try:
        yield
    except error as found:
        message = str(found)
    assert message is not None, f"expected {error.__name__}; nothing was raised"
    missing = [word for word in words if word not in message]
    assert not missing, f"the message lacks {missing}: {message}"
