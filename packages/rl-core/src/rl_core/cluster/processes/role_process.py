"""The caller's side of a role in its own process.

Messages use an inherited socket pair between a process and its child, which no other process can open. This module
reads nothing from disk or network. Calls made in one turn of the event loop are sent together and begin together in the
child, as in this process: results do not depend on transport speed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from rl_core.cluster.calls import STACKS, RoleCall
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.processes.frames import QUESTION, Numbered, receive_frame, send_frame, socket_pair
from rl_core.cluster.processes.guard import ProcessFamily, end_family
from rl_core.cluster.processes.output import FileOutput, PrefixedOutput, quote
from rl_core.cluster.processes.stack_dump import dump_of
from rl_core.cluster.ray.session import LOOPBACK
from rl_core.cluster.remote import RemoteProcess, role_environment
from rl_core.cluster.role_process import LaunchRequest
from rl_core.cluster.role_spec import RoleSpec

LAST_REPLIES_S = 1.0


class ChildProcess(RemoteProcess):
    """A role whose object lives in a child process."""

    def __init__(self, request: LaunchRequest, options: ClusterOptions) -> None:
        """Start the process; `start` waits for the object."""
        super().__init__(request, options)
        folder = options.log_directory
        self._output = PrefixedOutput(self._spec) if folder is None else FileOutput(folder, self._spec)
        self._frames: SimpleQueue[list[Numbered] | None] = SimpleQueue()
        self._has_exited = self._is_reaped = False
        self._process, self._connection = start_process(request, self._mark, self._output)
        self._reader = threading.Thread(target=self._read, name=f"read {self._spec}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"write {self._spec}", daemon=True)
        watcher = threading.Thread(target=self._watch, name=f"watch {self._spec}", daemon=True)
        for thread in (self._reader, self._writer, watcher):
            thread.start()

    @property
    def pid(self) -> int:
        """See `RoleProcess.pid`."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """See `RoleProcess.is_alive`."""
        return super().is_alive and not self._has_exited

    async def _make(self, spec: RoleSpec) -> None:
        context = replace(self._request.context, address=LOOPBACK)
        await self.call("", RoleCall([spec], "", (spec, context), {}).pack())

    async def _describe_delay(self) -> str:
        await self.kill("was ended because its start failed")  # makes its last lines available
        return (
            f"{self._spec} was not ready {self._request.deadline_s:g} s after its process (pid {self.pid}) started, "
            f"and was ended; {self._spec.factory} was still running. Raise the deadline. " + quote(self._output.tail())
        )

    async def _ask_stacks(self) -> str:
        return str(await self.call(STACKS, QUESTION))

    async def _dump(self, deadline_s: float) -> str:
        return await asyncio.to_thread(dump_of, self.pid, self._mark, deadline_s=deadline_s)

    async def _close_object(self) -> None:
        self._frames.put(None)
        await asyncio.wrap_future(self._ended)

    async def _end(self) -> None:
        with self._lock:
            if not self._is_reaped:
                # Not Popen.kill, which could reap the process and let its pid be reused while its family is still
                # searched for.
                os.kill(self.pid, signal.SIGKILL)
        await asyncio.wrap_future(self._ended)

    def _send(self, calls: list[tuple[int, Any]]) -> None:
        self._frames.put(calls)

    def _write(self) -> None:
        """Send frames from this thread, so that a process that does not read blocks no other thread."""
        with contextlib.suppress(OSError):  # it is dead; the watcher fails the calls
            while (frame := self._frames.get()) is not None:
                send_frame(self._connection, frame)
            send_frame(self._connection, None)

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                for number, packed in receive_frame(self._connection) or ():
                    self._calls.settle(number, packed)

    def _watch(self) -> None:
        """Fail pending calls once the process ends, even if its children keep the socket open."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._has_exited = True
        end_family(ProcessFamily(self._mark, self.pid))
        with self._lock:
            self._is_reaped = True
            self._process.wait()
        self._reader.join(LAST_REPLIES_S)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._frames.put(None)
        self._reader.join()
        self._writer.join()
        self._connection.close()
        self._report_end()

    def _describe_end(self) -> tuple[str, str]:
        how = f"the process of {self._spec} (pid {self.pid}) {describe_exit(self._process.returncode)}"
        return how, quote(self._output.tail())


def start_process(
    request: LaunchRequest, mark: str, output: FileOutput | PrefixedOutput
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a child process that serves calls, and return it with its connection."""
    parent, child = socket_pair()
    with child:
        words = [str(child.fileno()), str(os.getpid()), mark, str(request.spec), str(request.context.incarnation)]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "rl_core.cluster.processes.child", *words],
                pass_fds=[child.fileno()],
                env=child_environment(request, mark),
                stdin=subprocess.DEVNULL,
                stdout=output.open_for_child(),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        except BaseException:
            parent.close()
            raise
        output.started(process)
        return process, parent


def child_environment(request: LaunchRequest, mark: str) -> Mapping[str, str]:
    """Return the child's environment: this process's and the role's variables, GPUs, import path and family mark."""
    environment = {**os.environ, **role_environment(request.spec, mark)}
    if request.slot is not None and "CUDA_VISIBLE_DEVICES" not in request.spec.environment:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(request.slot.taken.gpus)
    return environment


def describe_exit(status: int | None) -> str:
    """Describe how a process ended, such as "was killed by signal SIGKILL (9)"."""
    if status is None:
        return "no longer answers"
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {name} ({-status})"
