"""Roles on this machine, in one process each or, for use with a debugger, as objects in this process."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rl_core.cluster.calls import RoleCall, describe_under_way
from rl_core.cluster.messages import named
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.pools import LOCAL_POOLS
from rl_core.cluster.processes.role_process import ChildProcess
from rl_core.cluster.ray.session import LOOPBACK
from rl_core.cluster.role_process import LaunchRequest, RoleProcess
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.served import ServedRole
from rl_core.cluster.stacks import process_stacks
from rl_core.errors import DeadlineError, NotReadyError, RLError


class InlineProcess:
    """A role's object in this process; it cannot die, and its synchronous methods cannot be interrupted."""

    def __init__(self, spec: RoleSpec, options: ClusterOptions) -> None:
        """Initialize without an object."""
        self._spec = spec
        self._close_deadline_s = options.close_deadline_s
        self._role = ServedRole()
        self._because: str | None = None
        self._calls: dict[asyncio.Future[Any], tuple[str, float]] = {}

    @classmethod
    async def start(cls, request: LaunchRequest, options: ClusterOptions) -> "InlineProcess":
        """Make the object; see `Launcher.launch`."""
        self = cls(request.spec, options)
        limit = asyncio.timeout(request.deadline_s)
        try:
            async with limit:
                await self._role.make(request.spec, replace(request.context, address=LOOPBACK))
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                text = (
                    f"{request.spec} was not ready after {request.deadline_s:g} s; {request.spec.factory} was still "
                    "running. Raise the deadline."
                )
                raise named(DeadlineError(text), request.spec) from None
            self._sign(error)
            raise
        return self

    @property
    def pid(self) -> int:
        """See `RoleProcess.pid`."""
        return os.getpid()

    @property
    def is_alive(self) -> bool:
        """See `RoleProcess.is_alive`."""
        return self._because is None

    @property
    def last_heard(self) -> str:
        """See `RoleProcess.last_heard`."""
        return "nothing, because it runs in this process"

    @property
    def under_way(self) -> str:
        """See `RoleProcess.under_way`."""
        return describe_under_way(list(self._calls.values()))

    async def stacks(self, deadline_s: float) -> str:  # noqa: ARG002 - this process answers at once
        """See `RoleProcess.stacks`; covers all threads and tasks of this process."""
        return process_stacks(asyncio.get_running_loop())

    async def call(self, method: str, parcel: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """See `RoleProcess.call`; an abandoned call continues, as in other placements."""
        if self._because is not None:
            raise NotReadyError(f"{self._spec} {self._because}.")
        call = asyncio.ensure_future(self._role.run(method, *parcel))
        self._calls[call] = method, time.monotonic()
        call.add_done_callback(self._calls.pop)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            call.add_done_callback(_drop)
            raise
        try:
            return call.result()
        except asyncio.CancelledError:
            if self.is_alive:
                raise
            raise NotReadyError(f"{self._spec} {self._because}.") from None
        except Exception as error:
            self._sign(error)
            raise

    def watch(self, callback: Callable[[RLError], None]) -> None:
        """See `RoleProcess.watch`."""

    async def close(self) -> None:
        """See `RoleProcess.close`."""
        await self.kill("was closed; start it again before calling it")

    async def kill(self, because: str) -> None:
        """See `RoleProcess.kill`; this closes the object too, within the deadline for closing."""
        if self._because is None:
            self._because = because
            for call in self._calls:
                call.cancel()
            limit = asyncio.timeout(self._close_deadline_s)
            try:
                async with limit:
                    await self._role.close()
            except TimeoutError:
                if not limit.expired():
                    # The object's own error; a close that exceeds the deadline is abandoned silently, as elsewhere.
                    raise

    def _sign(self, error: BaseException) -> None:
        note = f"Raised in {self._spec}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        named(error, self._spec)


def _drop(call: "asyncio.Future[Any]") -> None:
    """Ignore the error of an abandoned call."""
    if not call.cancelled():
        call.exception()


class LocalLauncher:
    """Starts child processes, or objects in this process that share its GPUs and output."""

    place = "this machine"
    pools = LOCAL_POOLS

    def __init__(self, options: ClusterOptions) -> None:
        """Initialize with these options."""
        self._options = options
        self._is_inline = options.kind == "inline"
        self.settle_s = 0.0 if self._is_inline else 3.0  # inline roles cannot die

    async def open(self) -> None:
        """See `Launcher.open`."""

    def pack(self, call: RoleCall) -> Any:
        """See `Launcher.pack`."""
        return (call.args, dict(call.kwargs)) if self._is_inline else call.pack()

    async def launch(self, request: LaunchRequest) -> RoleProcess:
        """See `Launcher.launch`."""
        if self._is_inline:
            return await InlineProcess.start(request, self._options)
        process = ChildProcess(request, self._options)
        await process.start()
        return process

    async def close(self) -> None:
        """See `Launcher.close`."""
