"""The transfer queue inside one process."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rl_core.data.batch import Batch
from rl_core.data.records import Prompt
from rl_core.errors import DataError
from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import QueueOptions, TaskSpec, checked_options
from rl_core.queue.journal.records import SEGMENTS
from rl_core.queue.messages import Reply, Request, Unpin, check_prompt, encode_prompt
from rl_core.queue.rows import Prepared
from rl_core.queue.service import QueueService
from rl_core.queue.shared_memory.slots import SlotPool, SlotRows

CLIENT = "this process"


class HeldRows:
    """Rows in this process's memory, without copies."""

    is_slow = False

    def prepare(self, batch: Batch) -> Prepared:
        """Use the batch as its own place."""
        return Prepared(batch, 0, None)

    def write(self, prepared: Prepared, place: Any) -> Any:
        """Raise an error: rows are their own place, so this is never called."""
        raise NotImplementedError

    def read(self, number: int, place: Any) -> Batch:  # noqa: ARG002
        """Return the batch itself."""
        batch: Batch = place
        return batch


class InProcessQueue(TransferQueue):
    """A `TransferQueue` in this process; thread-safe.

    Rows are stored without copies; with a journal, they are stored in memory-mapped files.
    """

    def __reduce__(self) -> NoReturn:
        raise DataError("an InProcessQueue cannot be sent to another process. Use a SharedMemoryQueue or a RayQueue.")

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        *,
        options: QueueOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the queue.

        Args:
            tasks: All tasks; a group is done once every task has acked it.
            options: Bounds and the journal's directory.
            clock: Returns seconds, for lease times; tests pass their own.

        Raises:
            DataError: A task names an unknown column.
            SettingsError: Two tasks share a name, a task needs a column that nothing adds, or an option is invalid.
            JournalError: The journal's directory cannot be used.
        """
        options = checked_options(tasks, options)
        self._unpinned: deque[int] = deque()
        self._condition = threading.Condition()
        self._num_waited = 0
        self._due_at = float("inf")
        self._has_journal = options.directory is not None
        if options.directory is None:
            super().__init__(tasks, HeldRows())
            self._service = QueueService(tasks, options, clock=clock)
        else:
            segments = Path(options.directory) / SEGMENTS
            super().__init__(tasks, SlotRows(segments, self._unpinned.append))
            self._service = QueueService(
                tasks, options, clock=clock, make_store=lambda: SlotPool(segments), is_pinning=True
            )

    def close(self) -> None:
        """See `TransferQueue.close`."""
        with self._condition:
            self._service.close()
            self._condition.notify_all()

    def _send(self, request: Request, *, deadline_s: float) -> Reply:  # noqa: ARG002 - the service applies it
        replies: list[Reply] = []
        with self._condition:
            if self._unpinned:
                numbers = [self._unpinned.popleft() for _ in range(len(self._unpinned))]
                self._service.submit(Unpin(numbers), CLIENT, lambda _: None)
            self._service.submit(request, CLIENT, replies.append)
            self._service.run()
            self._wake_waiters()
            while not replies:
                self._wait_until_due()
        return replies[0]

    def _wake_waiters(self) -> None:
        """Wake waiting threads if one was answered or must check the time earlier than planned."""
        is_answered = self._service.num_waited > self._num_waited
        self._num_waited = self._service.num_waited
        if is_answered or (self._service.num_waiting and time.monotonic() + self._wake_s() < self._due_at):
            self._condition.notify_all()

    def _wait_until_due(self) -> None:
        wake_s = self._wake_s()
        self._due_at = time.monotonic() + wake_s
        if not self._condition.wait(wake_s):
            self._service.run()
            self._wake_waiters()

    def _wake_s(self) -> float:
        return max(self._service.next_wake_s(), 0.0)

    def _pack(self, prompt: Prompt) -> Any:
        check_prompt(prompt)
        return encode_prompt(prompt) if self._has_journal else prompt  # a journal could not refuse it later
