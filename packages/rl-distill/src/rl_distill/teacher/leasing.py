"""Leases for an event loop: a thread waits on the queue, and releases leases that arrive too late."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from rl_core import TransferQueue
from rl_core.errors import NotReadyError
from rl_core.queue import Lease
from rl_distill.daemon_thread import in_daemon_thread


async def lease_group(queue: TransferQueue, task: str, *, deadline_s: float, lease_s: float) -> Lease:
    """Lease one group without blocking the event loop.

    If this call is cancelled, its thread keeps waiting. It releases a late lease at once, so that the queue delivers
    the group again.

    Raises:
        NothingToLeaseError: No issued group can become ready.
        DeadlineError: No group became ready in time.
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
    """Release a lease that no caller waits for, as soon as it arrives."""
    if ended.exception() is None:
        with suppress(NotReadyError):
            queue.release(ended.result())
