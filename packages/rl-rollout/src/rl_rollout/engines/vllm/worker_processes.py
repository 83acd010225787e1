"""vLLM's worker processes under tensor parallelism: their environment, and their cleanup."""

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from threading import Event, Thread
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from rl_core.weights import SHARED_MEMORY
from rl_rollout.engines.vllm.environment import unchanged_variables

CPU_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def worker_environment(num_workers: int, *, num_threads: int, is_cpu: bool) -> Iterator[None]:
    """Set the environment variables of the workers within the context.

    All of them are on this machine: gloo, which vLLM uses even for a single worker, listens on loopback. On CPUs, vLLM
    binds each worker to its own memory node, and refuses to start with fewer nodes than workers. Here, they share all
    nodes, unless the variable is set.

    Args:
        num_workers: Number of workers. 1 is this process.
        num_threads: Total number of threads.
        is_cpu: Whether the workers run on CPUs.
    """
    wanted = {} if GLOO_INTERFACE in os.environ else {GLOO_INTERFACE: "lo"}
    if num_workers > 1 and is_cpu:
        wanted |= {"OMP_NUM_THREADS": str(max(1, num_threads // num_workers))}
        wanted |= {} if CPU_BINDING in os.environ else {CPU_BINDING: "nobind"}
    with unchanged_variables(wanted):
        os.environ.update(wanted)
        yield


def watch_workers(executor: Any) -> Event:
    """End all workers of vLLM's executor when one has died.

    vLLM gives the others seconds to end by themselves, which they spend waiting for the dead one inside a collective.
    Meanwhile, their callers wait too.

    Returns:
        Event that ends the watch. Set it before the workers end.
    """
    processes = [worker.proc for worker in getattr(executor, "workers", ())]
    is_over = Event()

    def watch() -> None:
        connection.wait([process.sentinel for process in processes])
        if not is_over.is_set():
            for process in processes:
                process.kill()

    if processes:
        Thread(target=watch, name="watch vLLM's workers", daemon=True).start()
    return is_over


def unlink_queues(queues: Iterable[MessageQueue | None]) -> None:
    """Unlink queues that all processes have opened. Unlinked memory is freed with its last process."""
    for queue in queues:
        if queue is None:
            continue
        if queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.is_creator = False  # otherwise it would be unlinked again on garbage collection
            queue.buffer.shared_memory.unlink()
        for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr):
            if address is not None:
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def unlink_what_workers_share(init_method: str | None) -> None:
    """Unlink everything that a worker shares, after all ranks have connected.

    A killed worker removes nothing, and vLLM's memory for collectives on CPUs stays even after a clean end.

    Args:
        init_method: Where the ranks connected, such as "file:///tmp/vllm_dist_..."; None if they may connect again.
    """
    unlink_queues(item for item in gc.get_objects() if type(item) is MessageQueue)  # vLLM keeps no list of them
    finalizers: list[Any] = list(util._finalizer_registry.values())  # type: ignore[attr-defined] # private
    for finalizer in finalizers:
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined] # removes the name of a lock
            finalizer()
    if init_method is None:
        return
    meeting_point = Path(init_method.removeprefix("file://"))
    for segment in SHARED_MEMORY.glob(f"{meeting_point.name}-*"):
        segment.unlink(missing_ok=True)
    meeting_point.unlink(missing_ok=True)
