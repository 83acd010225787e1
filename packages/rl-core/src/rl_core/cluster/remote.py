"""The caller's side of a remote role, shared by processes and Ray actors."""

import asyncio
import os
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rl_core.cluster.calls import Calls, describe_call
from rl_core.cluster.messages import named
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.processes.guard import MARK_VARIABLE
from rl_core.cluster.role_process import LaunchRequest
from rl_core.cluster.role_spec import RoleSpec
from rl_core.cluster.stacks import NOT_ANSWERED
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleDiedError


class RemoteProcess(ABC):
    """A `RoleProcess` with remote calls; calls made in one turn of the event loop are sent together.

    A subclass starts the process, sends the calls, and calls `_report_end` after the process ends.
    """

    def __init__(self, request: LaunchRequest, options: ClusterOptions) -> None:
        """Initialize without a process."""
        self._request = request
        self._spec = request.spec
        self._close_deadline_s = options.close_deadline_s
        self._mark = uuid.uuid4().hex
        self._calls = Calls(self._spec)
        self._outgoing: list[tuple[int, Any]] = []
        self._because: str | None = None
        self._is_closed = False
        self._watchers: list[Callable[[RLError], None]] = []
        self._lock = threading.Lock()
        self._has_ended = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()

    async def start(self) -> None:
        """Wait for the role's object; see `Launcher.launch`."""
        spec = self._spec
        limit = asyncio.timeout(self._request.deadline_s)
        try:
            async with limit:
                await self._make(spec)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError) and limit.expired()
            text = await self._describe_delay() if is_late else ""
            await self.kill("was ended because its start failed")
            if is_late:
                raise named(DeadlineError(text), spec) from None
            raise

    @property
    @abstractmethod
    def pid(self) -> int:
        """See `RoleProcess.pid`."""

    @property
    def is_alive(self) -> bool:
        """See `RoleProcess.is_alive`."""
        return self._because is None and not self._has_ended

    @property
    def last_heard(self) -> str:
        """See `RoleProcess.last_heard`."""
        return self._calls.last_heard

    @property
    def under_way(self) -> str:
        """See `RoleProcess.under_way`."""
        return self._calls.under_way

    async def stacks(self, deadline_s: float) -> str:
        """See `RoleProcess.stacks`: a thread of the process answers; after half of the time, its signal handler."""
        half_s = deadline_s / 2
        limit = asyncio.timeout(half_s)
        try:
            async with limit:
                return await self._ask_stacks()
        except TimeoutError:
            if not limit.expired():
                raise
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - half_s))
        late = (
            f"{NOT_ANSWERED} {since}, {half_s:.1f} s: C code holds its interpreter, it is stopped, or it gets no CPU "
            "time. Its tasks are not known."
        )
        limit = asyncio.timeout(half_s)
        try:
            async with limit:
                return f"{late}\n{await self._dump(0.8 * half_s)}"
        except TimeoutError:
            if not limit.expired():
                raise
            return f"{late}\nSending it a signal took longer than {half_s:.1f} s."

    async def call(self, method: str, parcel: Any) -> Any:
        """See `RoleProcess.call`."""
        number, future = self._calls.begin(method)
        try:
            if not future.done():
                if not self._outgoing:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._outgoing.append((number, parcel))
            return await asyncio.wrap_future(future)
        finally:
            self._calls.forget(number)

    def watch(self, callback: Callable[[RLError], None]) -> None:
        """See `RoleProcess.watch`."""
        with self._lock:
            has_ended = self._has_ended
            if not has_ended:
                self._watchers.append(callback)
        if has_ended and self._because is None:
            callback(self._death(None))

    async def close(self) -> None:
        """See `RoleProcess.close`."""
        if self._because is None:
            self._because, self._is_closed = "was closed; start it again before calling it", True
        try:
            async with asyncio.timeout(self._close_deadline_s):
                await self._close_object()
        except TimeoutError:
            pass  # `_end` kills it
        finally:
            await self._end()

    async def kill(self, because: str) -> None:
        """See `RoleProcess.kill`."""
        self._because = self._because or because
        await self._end()

    # -- implemented by each placement

    @abstractmethod
    async def _make(self, spec: RoleSpec) -> None:
        """Make the object, by a call with an empty name."""

    @abstractmethod
    async def _describe_delay(self) -> str:
        """Explain why it was not ready in time; may end the process to find out."""

    @abstractmethod
    async def _ask_stacks(self) -> str: ...

    @abstractmethod
    async def _dump(self, deadline_s: float) -> str: ...

    @abstractmethod
    def _send(self, calls: list[tuple[int, Any]]) -> None:
        """Send calls with their numbers, which begin together in the role."""

    @abstractmethod
    async def _close_object(self) -> None:
        """Close the object and wait for completion."""

    @abstractmethod
    async def _end(self) -> None:
        """Kill remaining processes and wait for their end."""

    @abstractmethod
    def _describe_end(self) -> tuple[str, str]:
        """Return how it ended, such as "the process of engine[0] was killed", and further details."""

    # -- inside

    def _flush(self) -> None:
        calls, self._outgoing = self._outgoing, []
        self._send(calls)

    def _report_end(self) -> None:
        """Report the end, first to watchers, then to pending calls."""
        with self._lock:
            self._has_ended = True
            watchers = self._watchers if self._because is None else []
        for callback in watchers:
            callback(self._death(None))
        self._calls.fail_all(self._death)
        self._ended.set_result(None)

    def _death(self, method: str | None) -> RLError:
        if self._is_closed:
            return NotReadyError(f"{self._spec} {self._because}.")
        if self._because is not None:
            text = f"{self._spec} {self._because}."
        else:
            call = f" during {describe_call(method)}" if method is not None else ""
            how, more = self._describe_end()
            text = f"{how}{call}; its last message was {self.last_heard}. {more}"
        return named(RoleDiedError(text), self._spec)


def role_environment(spec: RoleSpec, mark: str) -> dict[str, str]:
    """Return the role's variables, this process's import path, and the family's mark."""
    paths = [*spec.environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return {
        **spec.environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        MARK_VARIABLE: f"{os.environ.get(MARK_VARIABLE, '')}:{mark}",
    }
