"""Leases for an event loop: the queue's wait is in a thread, and what comes too late is returned."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from rl_core import TransferQueue
from rl_core.errors import NotReadyError
from rl_core.queue import Lease
from rl_distill.daemon_thread import in_daemon_thread


async def lease_group(queue: TransferQueue, task: str, *, deadline_s: float, lease_s: float) -> Lease:
    """Lease one group, without blocking the event loop.

    When this call is cancelled, its thread goes on waiting; a lease that it still gets is released at once, so that
    the group is delivered to somebody else.

    Raises:
        NothingToLeaseError: Nothing that was issued can become ready.
        DeadlineError: Nothing became ready in time.
        NotReadyError: The queue was closed.
    """
    lease_one = partial(queue.lease, task, groups=1, deadline_s=deadline_s, lease_s=lease_s)
    found = in_daemon_thread(lease_one, name=f"lease for {task}")
    try:
        return await asyncio.wrap_future(found)
    except BaseException:
        found.add_done_callback(lambda ended: _release(queue, ended))
        raise


def _release(queue: TransferQueue, ended: Future[Lease]) -> None:
    """Return a lease that nobody waits for any more; in its thread, or at once where it is there."""
    if ended.exception() is None:
        with suppress(NotReadyError):
            queue.release(ended.result())
