"""Roles as Ray actors in placement groups."""

import asyncio
import os
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rl_core.cluster.calls import RoleCall
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.processes.guard import ProcessFamily, descendants, start_guard
from rl_core.cluster.ray.actor import to_wire
from rl_core.cluster.ray.pools import RAY_POOLS
from rl_core.cluster.ray.role_process import ActorProcess, store
from rl_core.cluster.ray.session import RayOptions, start_ray, stop_ray
from rl_core.cluster.role_process import LaunchRequest, RoleProcess
from rl_core.errors import RoleDiedError

SHARED_BYTES = 100_000
"""Minimum size at which arguments for several roles are stored once; smaller ones are sent with each call."""


class RayLauncher:
    """Starts actors; starts or joins Ray for the first one, and ends the Ray that it started."""

    pools = RAY_POOLS
    settle_s = 3.0  # Ray detects a lost node after 1.5 to 3 s

    def __init__(self, options: ClusterOptions) -> None:
        """Initialize with these options; Ray is not started yet."""
        self._options = options
        address = options.ray.address
        self.place = "Ray on this machine" if address is None else f"the Ray cluster at {address}"
        self._opening: Future[bool] | None = None

    async def open(self) -> None:
        """See `Launcher.open`."""
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = Future()
            self._opening.set_running_or_notify_cancel()
            threading.Thread(target=self._open, args=(self._opening,), name="start ray", daemon=True).start()
        await asyncio.wrap_future(self._opening)

    def pack(self, call: RoleCall) -> Any:
        """See `Launcher.pack`."""
        packed = call.pack()
        return store(packed) if len(call.specs) > 1 and packed.size_bytes > SHARED_BYTES else to_wire(packed)

    async def launch(self, request: LaunchRequest) -> RoleProcess:
        """See `Launcher.launch`; retries on another node if a node is lost."""
        ends_at = time.monotonic() + request.deadline_s
        while True:
            process = ActorProcess(request, self._options)
            try:
                await process.start()
            except RoleDiedError:
                left_s = ends_at - time.monotonic()
                if not process.lost_its_node or left_s <= 0:
                    raise
                request = replace(request, deadline_s=round(left_s, 1))
            else:
                return process

    async def close(self) -> None:
        """See `Launcher.close`."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        if not opening.done():
            opening.add_done_callback(_leave_late)  # its start was abandoned
            return
        if opening.exception() is None and opening.result():
            await asyncio.to_thread(SESSION.leave)

    def _open(self, opening: "Future[bool]") -> None:
        try:
            opening.set_result(SESSION.enter(self._options))
        except BaseException as error:
            opening.set_exception(error)


class RaySession:
    """The Ray runtime shared by this process's clusters; the last cluster to leave ends it.

    One thread starts Ray and keeps running, because the kernel ends Ray's processes with the thread that started them.
    """

    def __init__(self) -> None:
        """Initialize without Ray."""
        self._lock = threading.Lock()
        self._num_clusters = 0
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, options: ClusterOptions) -> bool:
        """Start or join Ray unless it is running; return True if `leave` must follow."""
        with self._lock:
            if not self._num_clusters:
                if sys.modules["ray"].is_initialized():
                    return False  # started by other code
                self._start(options)
            self._num_clusters += 1
            return True

    def leave(self) -> None:
        """Leave Ray; the last cluster ends it."""
        with self._lock:
            self._num_clusters -= 1
            if not self._num_clusters and self._thread is not None:
                self._leave.set()
                self._thread.join()

    def _start(self, options: ClusterOptions) -> None:
        started: Future[None] = Future()

        def stay() -> None:
            try:
                guard = start_guarded_ray(options.ray)
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._leave.wait()
            stop_ray()
            if guard is not None:
                os.kill(guard, signal.SIGKILL)

        self._leave.clear()
        self._thread = threading.Thread(target=stay, name="ray", daemon=True)
        self._thread.start()
        started.result()


def start_guarded_ray(options: RayOptions) -> int | None:
    """Start or join Ray; return the guard that ends started processes if this process is killed."""
    before = descendants(os.getpid())
    start_ray(options)
    if options.address is not None or sys.platform != "linux":
        return None
    return start_guard(ProcessFamily(uuid.uuid4().hex, known=descendants(os.getpid()) - before), [os.getpid()])


def _leave_late(opening: "Future[bool]") -> None:
    """Leave a Ray runtime that became ready after its cluster was closed."""
    if opening.exception() is None and opening.result():
        SESSION.leave()


SESSION = RaySession()
