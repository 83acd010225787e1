"""The server of a shared-memory queue: one process, thread and socket that never block on a client.

`server_process` runs it; it ends on `stop`, or with the process that started it.
"""

import contextlib
import os
import resource
import selectors
import shutil
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.journal.database import lock_directory
from rl_core.queue.journal.records import SEGMENTS
from rl_core.queue.messages import (
    FRAME,
    MAX_FRAME_BYTES,
    Done,
    Hello,
    Leased,
    Refused,
    Reply,
    Unpin,
    decode_request,
    encode_frame,
)
from rl_core.queue.service import QueueService
from rl_core.queue.shared_memory.slots import SlotPool

SOCKET = "socket"
READ_BYTES = 1 << 18
SPARE_DESCRIPTORS = 8
"""Descriptors that connections leave for segments and the journal."""
CREDENTIALS = struct.Struct("3i")


class _ClientConnection:
    """One client's connection with its input and output buffers; `answered` is called when output is pending."""

    def __init__(self, stream: socket.socket, answered: Callable[["_ClientConnection"], None]) -> None:
        self.stream = stream
        self._answered = answered
        self.client: str | None = None
        self.received = bytearray()
        self.unsent: list[bytes] = []
        self.is_open = True
        self.is_behind = False
        self.undelivered: int | None = None

    def reply(self, reply: Reply) -> None:
        """Queue an answer for the next turn of the loop."""
        self.undelivered = reply.lease_id if isinstance(reply, Leased) else None
        self.unsent.append(encode_frame(reply))
        self._answered(self)


def _is_welcome(stream: socket.socket) -> bool:
    """Return False for another user's process, and if few descriptors are left."""
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user not in (os.getuid(), 0):
            return False
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return stream.fileno() < limit - SPARE_DESCRIPTORS  # the system gives the smallest free number


class QueueServer:
    """Serves one queue on a socket in `folder`."""

    def __init__(
        self,
        folder: Path,
        tasks: Sequence[TaskSpec],
        options: QueueOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the queue and listen.

        Raises:
            JournalError: The journal cannot be opened, or no space is left.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._lock = lock_directory(folder)
        self.slots = (folder if options.directory is None else Path(options.directory)) / SEGMENTS
        self._tasks, self._has_journal = tasks, options.directory is not None
        self.service = QueueService(
            tasks, options, clock=clock, make_store=lambda: SlotPool(self.slots), is_pinning=True
        )
        self._connections: set[_ClientConnection] = set()
        self._answered: list[_ClientConnection] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._waker, self._alarm = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())
        self._selector.register(self._waker, selectors.EVENT_READ, lambda _: self._finish())
        self._is_ending = False
        self._is_over = not self._has_journal  # otherwise another server may reuse the folder

    def serve(self, *, owner: socket.socket | None = None) -> None:
        """Answer clients until `stop`, or until the owner closes its end of this socket."""
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ, lambda _: self._finish(is_over=True))
        try:
            while not self._is_ending:
                for key, events in self._selector.select(max(self.service.next_wake_s(), 0.0)):
                    key.data(events)
                self.service.run()
                for connection in self._answered:
                    self._flush(connection)
                self._answered.clear()
        finally:
            self._end()

    def stop(self) -> None:
        """End `serve`; callable from any thread or signal handler."""
        with contextlib.suppress(OSError):
            self._alarm.send(b"\0")

    def _finish(self, *, is_over: bool = False) -> None:
        self._is_ending, self._is_over = True, self._is_over or is_over

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return
        if not _is_welcome(stream):
            stream.close()
            return
        stream.setblocking(False)
        connection = _ClientConnection(stream, self._answered.append)
        self._connections.add(connection)
        self._selector.register(stream, selectors.EVENT_READ, partial(self._attend, connection))

    def _attend(self, connection: _ClientConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._answered.append(connection)
        if events & selectors.EVENT_READ:
            self._receive(connection)

    def _receive(self, connection: _ClientConnection) -> None:
        try:
            chunk = connection.stream.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        connection.received += chunk
        if not chunk or not self._take_frames(connection):
            self._drop(connection)

    def _take_frames(self, connection: _ClientConnection) -> bool:
        """Take all complete requests; return False if a frame is too large."""
        received = connection.received
        while len(received) >= FRAME.size:
            (size,) = FRAME.unpack_from(received)
            if size > MAX_FRAME_BYTES:
                return False
            end = FRAME.size + size
            if len(received) < end:
                break
            self._take(connection, received[FRAME.size : end])
            del received[:end]
        return True

    def _take(self, connection: _ClientConnection, frame: bytearray) -> None:
        connection.undelivered = None  # a client sends the next request only after receiving the answer
        try:
            message = decode_request(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            connection.reply(Refused("DataError", f"a request cannot be decoded: {error}."))
            return
        if isinstance(message, Hello) and connection.client is None:
            connection.client = message.client
            connection.reply(
                Done([msgspec.to_builtins(list(self._tasks)), str(self.slots), self._has_journal, os.getpid()])
            )
        elif isinstance(message, Hello):
            connection.reply(Refused("NotReadyError", "this connection has already sent Hello."))
        elif connection.client is None:
            connection.reply(Refused("NotReadyError", "the first message must be Hello."))
        elif isinstance(message, Unpin):
            self.service.submit(message, connection.client, lambda _: None)
        else:
            self.service.submit(message, connection.client, connection.reply)

    def _flush(self, connection: _ClientConnection) -> None:
        if not connection.unsent or not connection.is_open:
            return
        data = b"".join(connection.unsent) if len(connection.unsent) > 1 else connection.unsent[0]
        connection.unsent.clear()
        try:
            sent = connection.stream.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        if sent < len(data):
            connection.unsent.append(data[sent:])
        if connection.is_behind != (sent < len(data)):
            connection.is_behind = not connection.is_behind
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_behind else 0)
            self._selector.modify(connection.stream, events, partial(self._attend, connection))

    def _drop(self, connection: _ClientConnection) -> None:
        connection.is_open = False
        self._selector.unregister(connection.stream)
        self._connections.remove(connection)
        connection.stream.close()
        self.service.withdraw(connection.reply, connection.undelivered)
        client = connection.client
        if client is not None and all(other.client != client for other in self._connections):
            self.service.disconnect(client)

    def _end(self) -> None:
        self.service.close()
        for connection in self._connections:
            connection.stream.setblocking(True)
            with contextlib.suppress(OSError):
                connection.stream.settimeout(1.0)
                connection.stream.sendall(b"".join(connection.unsent))
            connection.stream.close()
        for stream in (self._listener, self._waker, self._alarm):
            stream.close()
        self._selector.close()
        if self._is_over:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
