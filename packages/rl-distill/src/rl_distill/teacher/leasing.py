"""Leases for an event loop: the queue's wait is in a thread, and what comes too late is given back."""

import asyncio
import threading
from contextlib import suppress

from rl_core import TransferQueue
from rl_core.errors import NotReadyError
from rl_core.queue.interface import Lease


async def lease_group(queue: TransferQueue, task: str, *, deadline_s: float, lease_s: float) -> Lease:
    """Lease one group, without blocking the event loop.

    When this call is cancelled, its thread goes on waiting; a lease that it still gets is released at once, so that
    the group is delivered to somebody else.

    Raises:
        NothingToLeaseError: Nothing that was issued can become ready.
        DeadlineError: Nothing became ready in time.
        NotReadyError: The queue was closed.
    """
    wait = _Wait(queue, asyncio.get_running_loop())
    threading.Thread(target=wait.run, args=(task, deadline_s, lease_s), name=f"lease for {task}", daemon=True).start()
    return await wait.result()


class _Wait:
    """One call of `lease` in a thread, which either side may outlive."""

    def __init__(self, queue: TransferQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue, self._loop = queue, loop
        self._lock = threading.Lock()
        self._is_over = asyncio.Event()
        self._is_abandoned = False
        self._lease: Lease | None = None
        self._error: Exception | None = None

    def run(self, task: str, deadline_s: float, lease_s: float) -> None:
        """Wait in the thread."""
        lease: Lease | None = None
        error: Exception | None = None
        try:
            lease = self._queue.lease(task, groups=1, deadline_s=deadline_s, lease_s=lease_s)
        except Exception as raised:  # passed on to the event loop
            error = raised
        with self._lock:
            if not self._is_abandoned:
                self._lease, self._error = lease, error
                self._loop.call_soon_threadsafe(self._is_over.set)
                return
        if lease is not None:
            self._release(lease)

    async def result(self) -> Lease:
        """The lease, in the event loop."""
        try:
            await self._is_over.wait()
        except BaseException:
            with self._lock:
                self._is_abandoned, lease = True, self._lease
            if lease is not None:
                self._release(lease)
            raise
        if self._lease is None:
            raise self._error or NotReadyError("the thread that waited for a lease ended without one.")
        return self._lease

    def _release(self, lease: Lease) -> None:
        with suppress(NotReadyError):
            self._queue.release(lease)
