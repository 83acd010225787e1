"""The transfer queue between processes on one host: rows in shared memory, requests over a socket."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rl_core import errors
from rl_core.errors import DeadlineError, NotReadyError, RoleError, SettingsError
from rl_core.files.locked_folders import make_locked_folder, remove_unlocked_folders
from rl_core.queue.client import TransferQueue
from rl_core.queue.interface import QueueOptions, TaskSpec, checked_options
from rl_core.queue.messages import (
    FRAME,
    MAX_FRAME_BYTES,
    Done,
    Hello,
    Reply,
    Request,
    Unpin,
    as_retry,
    decode_reply,
    encode_frame,
)
from rl_core.queue.shared_memory.server import SOCKET
from rl_core.queue.shared_memory.slots import SlotRows

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory on Linux
PREFIX = "rl-queue-"
START_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 10.0
GRACE_S = 20.0
"""Extra wait for an answer beyond the request's own deadline."""
RESTART_DEADLINE_S = 30.0
"""Maximum time for a dead server's restart."""
RECONNECT_PAUSE_S = 0.02
PAUSE_S = 1.0
READ_BYTES = 1 << 17


class SharedMemoryQueue(TransferQueue):
    """A `TransferQueue` for the processes on one host.

    The process that creates it starts a server process, and the queue ends with its creator. Other processes connect by
    its address, or by receiving the pickled queue as an argument. Rows are read in place as read-only views; their
    memory is reused only once no view exists.

    Attributes:
        server_pid: Process id of the server.
    """

    def __init__(self, tasks: Sequence[TaskSpec], *, options: QueueOptions | None = None) -> None:
        """Start a server for these tasks.

        Args:
            tasks: All tasks; a group is done once every task has acked it.
            options: Bounds and the journal's directory. With a journal, a dead server is restarted, and clients only
                notice a delay.

        Raises:
            DataError: A task names an unknown column.
            SettingsError: The tasks or options are invalid, or this host has no file-based shared memory.
            JournalError: The journal's directory cannot be used.
        """
        options = checked_options(tasks, options)
        self._server: _ServerProcess | None = _ServerProcess(tasks, options)
        try:
            self._connect(self._server.folder)
        except BaseException:
            self._server.close()
            raise

    @classmethod
    def connect(cls, address: str) -> "SharedMemoryQueue":
        """Join a queue by its address.

        Raises:
            RoleError: No queue has this address.
        """
        self = cls.__new__(cls)
        self._server = None
        self._connect(Path(address))
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle as a connection to the same queue."""
        return SharedMemoryQueue.connect, (self.address,)

    @property
    def address(self) -> str:
        """The address for `connect` in other processes on this host."""
        return str(self._folder)

    def close(self) -> None:
        """Leave the queue; it ends when its owner closes it."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        with self._lock:
            for stream in self._idle:
                stream.close()
            self._idle.clear()
        self._unpinner.close()

    def _connect(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._unpinned: deque[int] = deque()
        self._owner_pid = os.getpid()
        program = Path(sys.argv[0] or sys.executable).name
        self._client = f"pid {os.getpid()} ({program}) {uuid.uuid4().hex[:8]}"
        self._is_closed = False
        self.server_pid = 0
        stream, hello = self._open_first(time.monotonic() + GRACE_S)
        self._unpinner = stream
        tasks, slots, self._has_journal, self.server_pid = hello
        super().__init__(msgspec.convert(tasks, list[TaskSpec]), SlotRows(Path(slots), self._unpin))

    def _unpin(self, number: int) -> None:
        """Report an unused segment; called when arrays are freed, so it must not wait or take a lock."""
        if os.getpid() != self._owner_pid:
            return  # a fork's copy was freed; the parent may still read it
        try:
            self._unpinner.send(encode_frame(Unpin([number])), socket.MSG_DONTWAIT)
        except OSError:  # it is sent with the next request
            self._unpinned.append(number)

    def _open_first(self, ends_at: float) -> tuple[socket.socket, Any]:
        """Connect; waits while a server restarts, during which its folder exists."""
        while True:
            try:
                return self._open(ends_at)
            except OSError as error:
                if not self._folder.is_dir() or time.monotonic() > ends_at:
                    reason = error.strerror or error
                    raise RoleError(
                        f"no queue answers at {self._folder}: {reason}. Check that its owner is still running."
                    ) from error
                time.sleep(RECONNECT_PAUSE_S)

    def _open(self, ends_at: float) -> tuple[socket.socket, Any]:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(PAUSE_S)
            stream.connect(str(self._folder / SOCKET))
            stream.sendall(encode_frame(Hello(self._client)))
            reply = receive(stream, ends_at)
            if not isinstance(reply, Done):
                raise ConnectionError(f"unexpected answer {reply}")
        except BaseException:
            stream.close()
            raise
        return stream, reply.value

    def _send(self, request: Request, *, deadline_s: float) -> Reply:
        self._check_process()
        ends_at = time.monotonic() + deadline_s + GRACE_S
        lost_at: float | None = None
        while True:
            if self._is_closed:
                raise NotReadyError("the transfer queue is closed.")
            try:
                return self._exchange(request, ends_at)
            except TimeoutError as error:
                raise DeadlineError(
                    f"{type(request).__name__} waited {deadline_s + GRACE_S:g} s for the queue's server (pid "
                    f"{self.server_pid}), which is running but did not answer. It may be stopped by a signal."
                ) from error
            except OSError as error:
                lost_at = time.monotonic() if lost_at is None else lost_at
                self._refuse_lost(error, lost_at)
                request = as_retry(request)

    def _exchange(self, request: Request, ends_at: float) -> Reply:
        stream = self._take(ends_at)
        is_done = False
        try:
            frames = encode_frame(request)
            if self._unpinned:
                numbers = [self._unpinned.popleft() for _ in range(len(self._unpinned))]
                frames = encode_frame(Unpin(numbers)) + frames
            stream.sendall(frames)
            reply = receive(stream, ends_at)
            is_done = True
            return reply
        finally:
            if is_done:
                with self._lock:
                    self._idle.append(stream)
            else:
                stream.close()  # a late answer may still arrive

    def _take(self, ends_at: float) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        stream, hello = self._open(ends_at)
        self.server_pid = hello[3]
        return stream

    def _refuse_lost(self, error: Exception, lost_at: float) -> None:
        """After a lost connection, wait for the server's restart; raise an error with the cause if it cannot happen."""
        with self._lock:
            for stream in self._idle:
                stream.close()
            self._idle.clear()
        if self._is_closed or (self._server is not None and self._server.is_closing):
            raise NotReadyError("the transfer queue is closed.") from error
        if not self._has_journal and not self._is_server_there():
            raise RoleError(
                f"the queue's server (pid {self.server_pid}) and its state are "
                f"gone{self._server.how_it_ended() if self._server else ''}. The queue has no journal; set "
                "QueueOptions.directory to survive crashes."
            ) from error
        if self._server is not None:
            self._server.check()
        if time.monotonic() > lost_at + RESTART_DEADLINE_S or not self._folder.is_dir():
            raise RoleError(
                f"the queue's server (pid {self.server_pid}) does not answer, and its owner did not restart it: {error}"
                ". The owner may have ended, or the server may have too many connections. The queue can be reopened "
                "from its journal, if it has one."
            ) from error
        time.sleep(RECONNECT_PAUSE_S)

    def _is_server_there(self) -> bool:
        """Return True while the server's process runs: with too many connections, it refuses new ones."""
        if not self._folder.is_dir():
            return False
        try:
            os.kill(self.server_pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)
        return True

    def _check_process(self) -> None:
        """Drop connections inherited by a fork; each process uses its own."""
        if os.getpid() != self._owner_pid:
            self._server = None
            self._connect(self._folder)


class _ServerProcess:
    """The owner's view of the server's process, which is restarted after its death if it has a journal.

    The owner locks the folder, so that the folder is not removed as abandoned while no server runs.
    """

    def __init__(self, tasks: Sequence[TaskSpec], options: QueueOptions) -> None:
        if not SHARED_MEMORY.is_dir():
            raise SettingsError(
                f"a shared-memory queue needs {SHARED_MEMORY}, which this host lacks. Use an InProcessQueue or a "
                "RayQueue."
            )
        remove_unlocked_folders(SHARED_MEMORY.glob(f"{PREFIX}*"), lock_file="lock")  # left by killed owners
        self.folder, self._folder_lock = make_locked_folder(SHARED_MEMORY, PREFIX, mode=0o700)
        directory = None if options.directory is None else str(Path(options.directory).resolve())
        config = (str(self.folder), list(tasks), {**asdict(options), "directory": directory})
        self._config = msgspec.json.encode(config) + b"\n"
        self._has_journal = options.directory is not None
        self._lock = threading.Lock()
        self.is_closing = False
        self._error: Exception | None = None
        try:
            self._process, self._socket = self._start()
        except BaseException:
            self._remove_folder()
            raise
        threading.Thread(target=self._watch, name="watch queue server", daemon=True).start()

    def how_it_ended(self) -> str:
        """Describe how it ended, such as ": it was killed by SIGKILL"."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=1.0)
            return f": it was killed by {signal.Signals(-status).name}" if status < 0 else f": it ended with {status}"
        return ""

    def check(self) -> None:
        """Raise the error that prevented its restart."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the process, and remove its shared memory."""
        with self._lock:
            self.is_closing = True
            self._socket.close()
        try:
            self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        lock, self._folder_lock = self._folder_lock, -1
        if lock >= 0:
            os.close(lock)

    def _start(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "rl_core.queue.shared_memory.server_process", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        try:
            ours.settimeout(START_DEADLINE_S)
            ours.sendall(self._config)
            with ours.makefile("rb") as stream:
                line = stream.readline()
            status, detail = msgspec.json.decode(line) if line else ("RoleError", "it ended before it was ready.")
        except (OSError, ValueError) as error:
            status, detail = "RoleError", f"it was not ready after {START_DEADLINE_S:g} s: {error}"
        if status != "ready":
            ours.close()
            process.kill()
            process.wait()
            kind = getattr(errors, status, RoleError)
            raise kind(detail if kind is not RoleError else f"the queue's server could not be started: {detail}")
        return process, ours

    def _watch(self) -> None:
        while True:
            self._process.wait()
            with self._lock:
                if self.is_closing or not self._has_journal:
                    return
                self._socket.close()
                try:
                    self._process, self._socket = self._start()
                except (errors.RLError, OSError) as error:
                    self._error = error
                    return


def receive(stream: socket.socket, ends_at: float) -> Reply:
    """Receive a server's next answer; a connection has at most one request in flight.

    Raises:
        TimeoutError: The answer did not arrive in time.
        OSError: The connection ended.
    """
    received, size = bytearray(), FRAME.size
    while len(received) < size:
        try:
            chunk = stream.recv(READ_BYTES)
        except TimeoutError:
            if time.monotonic() > ends_at:
                raise
            continue
        if not chunk:
            raise ConnectionError("the server closed the connection")
        received += chunk
        if size == FRAME.size and len(received) >= size:
            size += FRAME.unpack_from(received)[0]
            if size > MAX_FRAME_BYTES:
                raise ConnectionError(f"an answer has {size} bytes, more than {MAX_FRAME_BYTES}")
    try:
        reply: Reply = decode_reply(memoryview(received)[FRAME.size :])
        return reply
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"an answer cannot be decoded: {error}") from error
