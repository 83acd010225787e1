# ruff: noqa: S101 - a test suite that other packages import: its assertions are its purpose
"""Base of the conformance checks of transfer queues."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.testing.fixtures import FakeClock, make_prompts, make_trajectory, wait_until

Result = TypeVar("Result")

DEADLINE_S = 20.0
"""Deadline for expected events; long enough for a busy machine."""

TRAIN = TaskSpec(name="train", needs=frozenset({"input_ids", "reward"}))
TRAIN_IN_ORDER = TaskSpec(name="train", needs=frozenset({"input_ids", "reward"}), order="issue")
REFERENCE = TaskSpec(name="reference", needs=frozenset({"input_ids"}), gives=frozenset({"reference_logprobs"}))

LARGE = 20_000
"""Number of tokens of a row that no backend sends inline."""


class QueueChecks:
    """Provides each check with a queue, a manual clock and threads, and cleans them up."""

    def make_queue(
        self, tasks: Sequence[TaskSpec], *, options: QueueOptions, clock: Callable[[], float]
    ) -> TransferQueue:
        """Create the queue under test; the only method that a backend's test class must define."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Set up a check; called by pytest."""
        self.clock = FakeClock()
        self._queues: list[TransferQueue] = []
        self._threads = ThreadPoolExecutor(max_workers=16)

    def teardown_method(self) -> None:
        """Clean up after a check; called by pytest. Closing wakes threads that a failed check left waiting."""
        for queue in self._queues:
            queue.close()
        self._threads.shutdown()

    def queue(self, *tasks: TaskSpec, **options: Any) -> TransferQueue:
        """Create a queue with these tasks, or with TRAIN."""
        queue = self.make_queue(tasks or (TRAIN,), options=QueueOptions(**options), clock=self.clock)
        self._queues.append(queue)
        return queue

    def filled(self, *tasks: TaskSpec, num_prompts: int, num_sessions: int = 1) -> TransferQueue:
        """Create a queue with complete groups of prompts p0, p1 and so on."""
        queue = self.queue(*tasks)
        queue.issue(make_prompts(num_prompts), num_sessions=num_sessions)
        for prompt in make_prompts(num_prompts):
            put_all(queue, prompt.uid, num_sessions=num_sessions)
        return queue

    def full(self, *, num_prompts: int = 3) -> TransferQueue:
        """Create a queue with capacity for two rows, both in use."""
        queue = self.queue(TRAIN, capacity_rows=2)
        queue.issue(make_prompts(num_prompts), num_sessions=1)
        for uid in ("p0", "p1"):
            put_all(queue, uid)
        return queue

    def advance(self, queue: TransferQueue, seconds: float) -> None:
        """Advance the time, and make the queue read its clock."""
        self.clock.advance(seconds)
        queue.stats()

    def spawn(self, call: Callable[..., Result], *args: Any, **kwargs: Any) -> "Future[Result]":
        """Run a call in a thread."""
        return self._threads.submit(call, *args, **kwargs)

    def wait_for_stat(self, queue: TransferQueue, name: str, value: float) -> None:
        """Wait for a value in the queue's statistics, such as a waiting thread."""
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


def uids_of(lease: Any) -> list[str]:
    """Return the uids of the leased prompts, in the lease's order."""
    return [prompt.uid for prompt in lease.prompts]


def states_of(queue: TransferQueue) -> list[str]:
    """Return the state of each prompt, in issue order."""
    return [entry.state for entry in queue.ledger()]


@contextmanager
def refuses(error: type[Exception], *words: str) -> Iterator[None]:
    """Expect an error whose message contains all these words."""
    message = None
    try:
        yield
    except error as found:
        message = str(found)
    assert message is not None, f"expected {error.__name__}; nothing was raised"
    missing = [word for word in words if word not in message]
    assert not missing, f"the message lacks {missing}: {message}"
