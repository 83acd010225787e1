"""The parent's side of a role in a process of its own.

Messages go over an inherited socket pair that nobody else can open, between a process and its own child;
they are pickled by multiprocessing's connections. Nothing is read from disk or network here.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from rl_core.cluster.messages import CallMessage, ReplyMessage
from rl_core.cluster.roles import RoleSpec
from rl_core.errors import DeadlineError, RoleError

CLOSE_DEADLINE_S = 20.0


class ProcessRole:
    """A role whose object lives in a child process."""

    def __init__(self, spec: RoleSpec) -> None:
        """Start the process; `start` also waits until the object is made."""
        parent, child = socket.socketpair()
        command = [sys.executable, "-m", "rl_core.cluster.child", str(child.fileno()), str(os.getpid())]
        environment = {**os.environ, **spec.environment}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._spec = spec
        self._process = subprocess.Popen(command, pass_fds=[child.fileno()], env=environment)  # noqa: S603 - our own module
        child.close()
        self._connection = Connection(parent.detach())
        self._send_lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._is_closing = False
        self._last_reply = "nothing"
        self._reader = threading.Thread(target=self._read, name=f"read {spec}", daemon=True)
        self._reader.start()

    @classmethod
    async def start(cls, spec: RoleSpec, *, deadline_s: float) -> "ProcessRole":
        """Start a role and wait until its object is made.

        Raises:
            DeadlineError: It took longer than deadline_s; the process is ended.
            RoleError: The process died.
        """
        role = cls(spec)
        try:
            await asyncio.wait_for(role.call("", spec.factory, dict(spec.kwargs)), deadline_s)
        except TimeoutError:
            await role.close()
            raise DeadlineError(f"{spec} was not ready {deadline_s:g} s after its process started.") from None
        except BaseException:
            await role.close()
            raise
        return role

    @property
    def spec(self) -> RoleSpec:
        """See `RoleHandle.spec`."""
        return self._spec

    @property
    def is_alive(self) -> bool:
        """See `RoleHandle.is_alive`."""
        return self._process.poll() is None and not self._is_closing

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `RoleHandle.call`."""
        future: Future[Any] = Future()
        message = CallMessage(next(self._call_ids), method, args, kwargs)
        self._calls[message.call_id] = future
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            self._calls.pop(message.call_id, None)
            raise self._death() from None
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.pop(message.call_id, None)

    async def close(self) -> None:
        """See `RoleHandle.close`."""
        if self._is_closing:
            return
        self._is_closing = True
        await asyncio.to_thread(self._end_process)

    def _end_process(self) -> None:
        try:
            with self._send_lock:
                self._connection.send(None)
        except OSError:
            pass  # it is already dead, which is what is wanted
        try:
            self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSE_DEADLINE_S)
        self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                reply: ReplyMessage = self._connection.recv()
            except (EOFError, OSError):
                break
            self._last_reply = f"the reply to call {reply.call_id}"
            future = self._calls.get(reply.call_id)
            if future is None or future.cancelled():
                continue
            if reply.error is not None:
                future.set_exception(reply.error.rebuild(str(self._spec)))
            else:
                future.set_result(reply.result)
        self._process.wait()
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(self._death())

    def _death(self) -> RoleError:
        code = self._process.poll()
        how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return RoleError(
            f"the process of {self._spec} (pid {self._process.pid}) {how}; the last thing heard from it was "
            f"{self._last_reply}. Its output above says more."
        )
