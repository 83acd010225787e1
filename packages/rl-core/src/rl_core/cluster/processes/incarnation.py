"""The caller's side of a role in a process of its own.

Messages go over an inherited socket pair that nobody else can open, between a process and its own child. Nothing is
read from disk or network here. Calls made in one turn of the event loop travel together and begin together there, as
they would in this process: what the role makes of them does not depend on how fast they travel.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from rl_core.cluster.calls import STACKS, Call, Calls, describe_call
from rl_core.cluster.incarnation import Birth
from rl_core.cluster.messages import named
from rl_core.cluster.options import ClusterOptions, RestartPolicy
from rl_core.cluster.processes.frames import QUESTION, Numbered, receive_frame, send_frame, socket_pair
from rl_core.cluster.processes.guard import MARK_VARIABLE, Family, end_family
from rl_core.cluster.processes.output import FileOutput, PrefixedOutput, RoleOutput, quote
from rl_core.cluster.processes.packing import Packed
from rl_core.cluster.processes.stack_dump import ask_then_dump, dump_of
from rl_core.cluster.ray.session import LOOPBACK
from rl_core.errors import DeadlineError, NotReadyError, RLError, RoleDiedError

LAST_REPLIES_S = 1.0


class ProcessIncarnation:
    """A role whose object lives in a child process."""

    def __init__(self, birth: Birth, options: ClusterOptions) -> None:
        """Start the process; `start` also waits until the object is made."""
        self._birth = birth
        self._spec = birth.spec
        self._close_deadline_s = options.close_deadline_s
        folder = options.log_directory
        self._output: RoleOutput = PrefixedOutput(self._spec) if folder is None else FileOutput(folder, self._spec)
        self._mark = uuid.uuid4().hex
        self._calls = Calls(self._spec)
        self._outgoing: list[Numbered] = []
        self._frames: SimpleQueue[list[Numbered] | None] = SimpleQueue()
        self._because: str | None = None
        self._is_closed = False
        self._watchers: list[Callable[[RLError], None]] = []
        self._lock = threading.Lock()
        self._has_exited = False
        self._has_ended = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self._process, self._connection = start_process(birth, self._mark, self._output)
        self._reader = threading.Thread(target=self._read, name=f"read {self._spec}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"write {self._spec}", daemon=True)
        watcher = threading.Thread(target=self._watch, name=f"watch {self._spec}", daemon=True)
        for thread in (self._reader, self._writer, watcher):
            thread.start()

    @classmethod
    async def start(cls, birth: Birth, options: ClusterOptions) -> "ProcessIncarnation":
        """Start a process and wait until the role's object is made; see `Launcher.launch`."""
        self = cls(birth, options)
        spec = replace(birth.spec, restart=RestartPolicy())  # whose hook may be local to a function
        context = replace(birth.context, address=LOOPBACK)
        limit = asyncio.timeout(birth.deadline_s)
        try:
            async with limit:
                await self.call("", Call([spec], "", (spec, context), {}).pack())
        except BaseException as error:
            await self.kill("its start failed")
            if isinstance(error, TimeoutError) and limit.expired():
                raise named(
                    DeadlineError(
                        f"{spec} was not ready {birth.deadline_s:g} s after its process (pid {self.pid}) started, and "
                        f"was ended; {spec.factory} was still running. Give it a longer deadline. "
                        + quote(self._output.tail())
                    ),
                    spec,
                ) from None
            raise
        return self

    @property
    def pid(self) -> int:
        """See `Incarnation.pid`."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """See `Incarnation.is_alive`."""
        return self._because is None and not self._has_exited

    @property
    def last_heard(self) -> str:
        """See `Incarnation.last_heard`."""
        return self._calls.last_heard

    @property
    def under_way(self) -> str:
        """See `Incarnation.under_way`."""
        return self._calls.under_way

    async def stacks(self, deadline_s: float) -> str:
        """See `Incarnation.stacks`: a thread of the process answers, else its handler of a signal."""

        async def ask() -> str:
            return str(await self.call(STACKS, QUESTION))

        async def dump(left_s: float) -> str:
            return await asyncio.to_thread(dump_of, self.pid, self._mark, deadline_s=left_s)

        return await ask_then_dump(ask, dump, deadline_s)

    async def call(self, method: str, parcel: Packed) -> Any:
        """See `Incarnation.call`."""
        number, future = self._calls.begin(method)
        try:
            if not future.done():
                self._post(Numbered(number, parcel))
            return await asyncio.wrap_future(future)
        finally:
            self._calls.forget(number)

    def watch(self, callback: Callable[[RLError], None]) -> None:
        """See `Incarnation.watch`."""
        with self._lock:
            has_ended = self._has_ended
            if not has_ended:
                self._watchers.append(callback)
        if has_ended and self._because is None:
            callback(self._death(None))

    async def close(self) -> None:
        """See `Incarnation.close`."""
        if self._because is None:
            self._because, self._is_closed = "was closed; start it again before calling it", True
        self._frames.put(None)
        try:
            async with asyncio.timeout(self._close_deadline_s):
                await asyncio.wrap_future(self._ended)
        except TimeoutError:
            self._kill_process()
        except BaseException:
            self._kill_process()
            raise
        await asyncio.wrap_future(self._ended)

    async def kill(self, because: str) -> None:
        """See `Incarnation.kill`."""
        self._because = self._because or because
        self._kill_process()
        await asyncio.wrap_future(self._ended)

    def _kill_process(self) -> None:
        """Not by its `Popen`, which would reap it, and let others have its number while its family is looked for."""
        with self._lock:
            if not self._has_exited:
                os.kill(self.pid, signal.SIGKILL)

    def _post(self, message: Numbered) -> None:
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
                send_frame(self._connection, frame)
            send_frame(self._connection, None)

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                for number, packed in receive_frame(self._connection) or ():
                    self._calls.settle(number, packed)

    def _watch(self) -> None:
        """Fail the waiting calls once the process is gone, even where its own children keep the socket open."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        end_family(Family(self._mark, self.pid))
        with self._lock:
            self._has_exited = True
            self._process.wait()
        self._reader.join(LAST_REPLIES_S)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._frames.put(None)
        self._reader.join()
        self._writer.join()
        self._connection.close()
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
            return RoleDiedError(f"{self._spec} {self._because}.", role=self._spec.name, rank=self._spec.rank)
        call = f" while {describe_call(method)} was waited for" if method is not None else ""
        how = describe_exit(self._process.returncode)
        text = (
            f"the process of {self._spec} (pid {self.pid}) {how}{call}; the last thing heard from it was "
            f"{self.last_heard}. {quote(self._output.tail())}"
        )
        return RoleDiedError(text, role=self._spec.name, rank=self._spec.rank)


def start_process(birth: Birth, mark: str, output: RoleOutput) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a child that waits for calls, and the connection to it."""
    parent, child = socket_pair()
    with child:
        words = [str(child.fileno()), str(os.getpid()), mark, str(birth.spec), str(birth.context.incarnation)]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "rl_core.cluster.processes.child", *words],
                pass_fds=[child.fileno()],
                env=child_environment(birth, mark),
                stdin=subprocess.DEVNULL,
                stdout=output.open_for_child(),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except BaseException:
            parent.close()
            raise
        output.started(process)
        return process, parent


def child_environment(birth: Birth, mark: str) -> Mapping[str, str]:
    """This process's environment, the role's own, its GPUs, the import path, and the mark of its descendants."""
    environment = {**os.environ, **birth.spec.environment}
    if birth.slot is not None and "CUDA_VISIBLE_DEVICES" not in birth.spec.environment:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(birth.slot.taken.gpus)
    paths = [*birth.spec.environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment[MARK_VARIABLE] = f"{os.environ.get(MARK_VARIABLE, '')}:{mark}"
    return environment


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
