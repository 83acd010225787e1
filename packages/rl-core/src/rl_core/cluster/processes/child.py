"""The child's side of a role in a process: `python -m rl_core.cluster.processes.child FD PARENT MARK ROLE NUMBER`.

It ends whenever its parent ends: the socket closes, and a guard that watches both processes kills it and its children.
"""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import traceback

from rl_core.cluster.messages import RemoteError
from rl_core.cluster.processes.frames import Numbered, receive_frame, send_frame
from rl_core.cluster.processes.guard import ProcessFamily, start_guard
from rl_core.cluster.processes.output import log_header
from rl_core.cluster.processes.packing import Packed, pack
from rl_core.cluster.processes.stack_dump import register_dump
from rl_core.cluster.served import ServedRole
from rl_core.cluster.stacks import process_stacks


class RoleServer:
    """Runs one object's methods for incoming calls."""

    def __init__(self, connection: socket.socket) -> None:
        """Initialize with this connection."""
        self._connection = connection
        self._send_lock = threading.Lock()
        self._role = ServedRole()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = asyncio.Event()

    async def serve(self) -> None:
        """Answer calls until the parent sends the end."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="read parent", daemon=True).start()
        await self._has_ended.wait()
        await self._role.close()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                messages = receive_frame(self._connection)
            except (EOFError, OSError):
                os._exit(1)  # the parent has ended
            except Exception:  # unreadable header: the calls are unknown, so none can be answered
                traceback.print_exc()
                os._exit(1)
            if messages is None:
                loop.call_soon_threadsafe(self._has_ended.set)
                return
            calls = [(number, packed) for number, packed in messages if packed.body]
            if calls:
                loop.call_soon_threadsafe(self._begin, calls)
            for number, packed in messages:
                if not packed.body:  # a request for stacks, answered here because the loop may be blocked
                    self._send_stacks(number, loop)

    def _begin(self, messages: list[Numbered]) -> None:
        """Begin calls in one turn of the event loop."""
        for number, packed in messages:
            task = asyncio.get_running_loop().create_task(self._answer(number, packed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, packed: Packed) -> None:
        answer = await self._role.answer(packed)
        if self._has_ended.is_set():
            return  # the parent tells its callers that the role was closed
        self._send(number, answer)

    def _send_stacks(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        try:
            answer = pack((True, process_stacks(loop)))
        except Exception as error:  # for example, unreadable source code; the reader continues
            answer = pack((False, RemoteError.of(error)))
        with contextlib.suppress(OSError):  # the parent has ended; the next read detects it
            self._send(number, answer)

    def _send(self, number: int, answer: Packed) -> None:
        with self._send_lock:
            send_frame(self._connection, [(number, answer)])


def main() -> None:
    """Run until the parent closes the connection."""
    fd, parent_pid, mark, role, incarnation = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    register_dump(mark)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if stat.S_ISREG(os.fstat(1).st_mode):
        sys.stderr.write(log_header(role, int(incarnation)))
    if sys.platform == "linux":
        start_guard(ProcessFamily(mark, os.getpid()), [os.getpid(), int(parent_pid)])
    if os.getppid() != int(parent_pid):
        os._exit(1)
    asyncio.run(RoleServer(socket.socket(fileno=int(fd))).serve())


if __name__ == "__main__":
    main()
