"""Leases for an event loop: the queue's wait is in a thread, and what comes too late is given back."""

import asyncio
import threading
from contextlib import suppress

from rl_core.errors import NotReadyError
from rl_core.queue.interface import Lease, TransferQueue


async def lease_group(queue: TransferQueue, task: str, *, deadline_s: float, lease_s: float) -> Lease:
    """Lease one group, without blocking the event loop.

    When this call is cancelled, its thread goes on waiting; a lease that it still gets is released at once, so that
    the group is delivered to somebody else.

    Raises:
        NothingToLeaseError: Nothing that was issued can become ready.
        DeadlineError: Nothing became ready in time.
        NotReadyError: The queue was closed.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Lease] = loop.create_future()

    def settle(lease: Lease | None, error: Exception | None) -> None:
        if found.cancelled():
            if lease is not None:
                _give_back(queue, lease)
        elif error is not None:
            found.set_exception(error)
        elif lease is not None:
            found.set_result(lease)

    def wait() -> None:
        lease: Lease | None = None
        error: Exception | None = None
        try:
            lease = queue.lease(task, groups=1, deadline_s=deadline_s, lease_s=lease_s)
        except Exception as raised:  # passed on to the event loop
            error = raised
        try:
            loop.call_soon_threadsafe(settle, lease, error)
        except RuntimeError:  # the event loop is closed
            if lease is not None:
                _give_back(queue, lease)

    threading.Thread(target=wait, name=f"lease for {task}", daemon=True).start()
    return await found


def _give_back(queue: TransferQueue, lease: Lease) -> None:
    with suppress(NotReadyError):
        queue.release(lease)
