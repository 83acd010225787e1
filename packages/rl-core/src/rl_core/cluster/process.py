"""The parent's side of a role in a process of its own.

Messages go over an inherited socket pair that nobody else can open, between a process and its own child;
they are pickled by multiprocessing's connections. Nothing is read from disk or network here.

Calls made in one turn of the event loop travel together and begin together there, as they would in this
process: what the role makes of them does not depend on how fast they travel.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NamedTuple

from rl_core.cluster.messages import CallMessage, ReplyMessage
from rl_core.cluster.roles import RoleSpec
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleError

CLOSE_DEADLINE_S = 20.0
LAST_REPLIES_S = 1.0


class _Waiting(NamedTuple):
    """A call that waits for its reply."""

    method: str
    future: Future[Any]


class ProcessRole:
    """A role whose object lives in a child process."""

    def __init__(self, spec: RoleSpec) -> None:
        """Start the process; `start` also waits until the object is made."""
        self._spec = spec
        self._process, self._connection = start_process(spec)
        self._outgoing: list[bytes] = []
        self._frames: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._calls: dict[int, _Waiting] = {}
        self._call_ids = itertools.count()
        self._is_closing = False
        self._close_lock = threading.Lock()
        self._has_ended = threading.Event()
        self._reading_error: Exception | None = None
        self._last_reply = "nothing"
        self._reader = threading.Thread(target=self._read, name=f"read {spec}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"write {spec}", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"watch {spec}", daemon=True)
        self._reader.start()
        self._writer.start()
        self._watcher.start()

    @classmethod
    async def start(cls, spec: RoleSpec, *, deadline_s: float) -> "ProcessRole":
        """Start a role and wait until its object is made.

        Raises:
            DeadlineError: It took longer than deadline_s; the process is ended.
            RoleError: The process died.
        """
        role = cls(spec)
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                await role.call("", spec.factory, dict(spec.kwargs))
        except Exception:
            if limit.expired():
                role._process.kill()
            await role.close()
            if limit.expired():
                raise DeadlineError(
                    f"{spec} was not ready {deadline_s:g} s after its process (pid {role.pid}) started, and was ended; "
                    f"{spec.factory} was still running. Give it a longer deadline, or see its output above."
                ) from None
            raise
        except BaseException:
            role._process.kill()
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
        future.set_running_or_notify_cancel()  # a caller that gives up must not race with the reply
        message = CallMessage(next(self._call_ids), method, args, kwargs)
        self._calls[message.call_id] = _Waiting(method, future)
        try:
            if self._is_closing or self._has_ended.is_set():
                raise self._death(method)
            self._post(ForkingPickler.dumps(message).tobytes())
            return await asyncio.wrap_future(future)
        finally:
            self._calls.pop(message.call_id, None)

    async def close(self) -> None:
        """See `RoleHandle.close`."""
        self._is_closing = True
        await asyncio.to_thread(self._end_process)

    def _post(self, message: bytes) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        self._frames.put(messages)

    def _write(self) -> None:
        """Send frame by frame, so that nobody else waits for a process that does not read."""
        with contextlib.suppress(OSError):  # it is dead; who watches it fails the calls
            while (frame := self._frames.get()) is not None:
                self._connection.send(frame)
            self._connection.send(None)

    def _end_process(self) -> None:
        self._frames.put(None)
        if not self._has_ended.wait(CLOSE_DEADLINE_S):
            self._process.kill()
        self._watcher.join()
        self._writer.join()
        with self._close_lock:
            if not self._connection.closed:
                self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                reply: ReplyMessage = self._connection.recv()
            except (EOFError, OSError):
                return
            except Exception as error:  # a reply of a class that this process cannot load
                self._reading_error = error
                self._process.kill()
                return
            waiting = self._calls.get(reply.call_id)
            if waiting is None:
                continue
            self._last_reply = f"the answer of {_describe(waiting.method)}"
            if reply.error is not None:
                waiting.future.set_exception(reply.error.rebuild(str(self._spec)))
            else:
                waiting.future.set_result(reply.result)

    def _watch(self) -> None:
        """Fail the waiting calls once the process is gone, even where its own children keep the socket open."""
        self._process.wait()
        self._reader.join(LAST_REPLIES_S)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._has_ended.set()
        for waiting in list(self._calls.values()):
            if not waiting.future.done():
                waiting.future.set_exception(self._death(waiting.method))

    def _death(self, method: str) -> RLError:
        if self._is_closing:
            return NotReadyError(f"{self._spec} was closed; start it again before calling it.")
        if self._reading_error is not None:
            error = RoleError(f"{self._spec} answered with something that cannot be read: {self._reading_error!r}.")
            error.__cause__ = self._reading_error
            return error
        return RoleError(
            f"the process of {self._spec} (pid {self.pid}) {describe_exit(self._process.poll())} while "
            f"{_describe(method)} was waited for; the last thing heard from it was {self._last_reply}. "
            "Its output above says more."
        )


def start_process(spec: RoleSpec) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start a child that waits for calls, and the connection to it."""
    # The kernel's signal comes when the thread that made the child ends, so only the main thread may ask for it.
    dies_with_thread = threading.current_thread() is threading.main_thread()
    parent, child = socket.socketpair()
    with parent, child:
        command = [sys.executable, "-m", "rl_core.cluster.child"]
        command += [str(child.fileno()), str(os.getpid()), "signal" if dies_with_thread else "socket"]
        environment = {**os.environ, **spec.environment}
        paths = [*spec.environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the child until it ignores Ctrl-C
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, pass_fds=[child.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process, Connection(parent.detach())


def _describe(method: str) -> str:
    return f"{method!r}" if method else "its start"


def describe_exit(status: int | None) -> str:
    """How a process ended, such as "was killed by signal SIGKILL (9)"."""
    if status is None:
        return "no longer answers"
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {name} ({-status})"
