"""The child's side of a role in a process of its own: `python -m rl_core.cluster.child FD PARENT_PID HOW`.

It ends when its parent ends, however that happens: the socket closes, and on Linux the kernel kills it, where
HOW is "signal".
"""

import asyncio
import ctypes
import inspect
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from rl_core.cluster.messages import CallMessage, RemoteError, ReplyMessage
from rl_core.cluster.roles import load_factory

PR_SET_PDEATHSIG = 1


class RoleServer:
    """Runs one object's methods as calls come in."""

    def __init__(self, connection: Connection) -> None:
        """Serve calls from this connection."""
        self._connection = connection
        self._send_lock = threading.Lock()
        self._target: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = asyncio.Event()

    async def serve(self) -> None:
        """Answer calls until the parent says that it is enough."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="read parent", daemon=True).start()
        await self._has_ended.wait()
        if hasattr(self._target, "close"):
            result = self._target.close()
            if inspect.isawaitable(result):
                await result

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                frame = self._connection.recv()
                messages = frame and [ForkingPickler.loads(message) for message in frame]
            except (EOFError, OSError):
                os._exit(1)  # the parent is gone, and nobody is left to tell
            except Exception:  # a call of a class that this process cannot load; whose call it was is lost
                traceback.print_exc()
                os._exit(1)
            if messages is None:
                loop.call_soon_threadsafe(self._has_ended.set)
                return
            loop.call_soon_threadsafe(self._begin, messages)

    def _begin(self, messages: list[CallMessage]) -> None:
        """Begin calls in one turn of the event loop."""
        for message in messages:
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: CallMessage) -> None:
        try:
            result = await self._run(message)
            self._send(ReplyMessage(message.call_id, result, None))
        except (Exception, asyncio.CancelledError) as error:  # also a result that cannot be pickled
            if self._has_ended.is_set():
                raise  # the parent tells its callers that the role was closed
            self._send(ReplyMessage(message.call_id, None, RemoteError.of(error)))

    def _send(self, reply: ReplyMessage) -> None:
        with self._send_lock:
            self._connection.send(reply)

    async def _run(self, message: CallMessage) -> Any:
        if not message.method:
            factory, kwargs = message.args
            self._target = load_factory(factory)(**kwargs)
            return None
        result = getattr(self._target, message.method)(*message.args, **message.kwargs)
        return await result if inspect.isawaitable(result) else result


def main() -> None:
    """Run until the parent closes the connection."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux" and sys.argv[3] == "signal":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    connection = Connection(fd)

    async def serve() -> None:
        await RoleServer(connection).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
