"""The sender of weights over the network, which listens for engines and sends the current version to each.

It listens on one address while a receiver is missing, for engines that know its secret, which they receive with the
update through the role call. Each engine keeps a connection for requests, and each of its workers one for tensors. A
dead engine does not affect others, and a restarted one receives the current weights on request.
"""

import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from rl_core.errors import NotReadyError, RLError, SettingsError, TransferError
from rl_core.record_fields import settings_record
from rl_core.weights.broadcast_group import SENDER, BroadcastGroup
from rl_core.weights.secret_sockets import (
    SECRET_BYTES,
    SecretListener,
    hang_up,
    is_readable,
    receive_message,
    send_message,
)
from rl_core.weights.update import Broadcast

log = logging.getLogger(__name__)

MAX_WORKERS = 4096
POLL_S = 0.05
"""Interval of checks that an engine is still alive while its workers are missing."""
DEFAULT_BUCKET_BYTES = 256 * 2**20
Packed = tuple[int, Callable[[], Iterable[torch.Tensor]]]
"""A policy version, and a function that returns its tensors."""


@settings_record
class SenderOptions:
    """Options of a weight sender.

    Attributes:
        backend: "nccl" sends from the current GPU; every engine worker must use another GPU. "gloo" is the former name
            of "tcp".
        host: Address of this machine that engines can reach; the sender listens only there.
        bucket_bytes: Maximum number of bytes in flight.
        deadline_s: Maximum wait in seconds for a receiver, per step.
        num_receivers: Number of expected engines: once all are connected, nothing listens until one is lost. None
            always listens.
    """

    backend: Literal["tcp", "gloo", "nccl"] = "tcp"
    host: str = "127.0.0.1"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    deadline_s: float = 60.0
    num_receivers: int | None = None


class _Engine:
    """The sender's view of one receiver: its connection for requests, and those of its workers."""

    def __init__(self, connection: socket.socket, *, num_workers: int) -> None:
        self.connection, self.num_workers = connection, num_workers
        self.workers: dict[int, socket.socket] = {}
        self.group: BroadcastGroup | None = None
        self.is_served = False

    @property
    def is_whole(self) -> bool:
        """True once all workers are connected."""
        return len(self.workers) == self.num_workers

    def hang_up(self) -> None:
        """Make the threads that wait for it stop waiting."""
        for connection in (self.connection, *self.workers.values()):
            hang_up(connection)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        for connection in (self.connection, *self.workers.values()):
            connection.close()


class WeightSender:
    """Sends one version in buckets to engines in other processes and on other machines, until the next version."""

    def __init__(self, options: SenderOptions) -> None:
        """Start listening.

        Raises:
            SettingsError: This machine does not have the address, or has no GPU for NCCL.
        """
        secret = secrets.token_bytes(SECRET_BYTES)
        is_nccl = options.backend == "nccl"
        if is_nccl and not torch.cuda.is_available():
            raise SettingsError(
                'weights.transport = "nccl" sends weights from a GPU, but torch finds none. Set weights.transport = '
                '"tcp" or "file".'
            )
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self._engines: dict[str, _Engine] = {}
        self._packed: Packed | None = None
        self._num_receivers = options.num_receivers
        self._num_sending = 0
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._listener = SecretListener(options.host, secret, self._serve)
        self.meeting = Broadcast(
            backend=options.backend,
            host=options.host,
            port=self._listener.port,
            secret=secret.hex(),
            bucket_bytes=options.bucket_bytes,
            deadline_s=options.deadline_s,
        )

    def offer(self, version: int, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Send these tensors on request from now on.

        Engines that are still receiving the previous version have until the deadline to finish.

        Args:
            version: Policy version.
            tensors: Returns the tensors for each engine, in its thread; they must not change until withdrawn.

        Raises:
            NotReadyError: The sender is closed.
        """
        if self._is_closed:
            raise NotReadyError("the weight transport is closed. Create a new one.")
        self._replace((version, tensors))

    def withdraw(self) -> None:
        """Stop sending; engines that are receiving have until the deadline to finish."""
        self._replace(None)

    def expect(self, num_receivers: int) -> None:
        """Set the number of expected engines."""
        with self._changed:
            self._num_receivers = num_receivers
            self._listen_while_needed()

    def close(self) -> None:
        """Withdraw, and disconnect from every engine. Can be called twice."""
        self._listener.close()
        with self._changed:
            self._is_closed = True
        self._replace(None)
        with self._changed:
            serving = dict(self._serving)
        for thread, connection in serving.items():
            hang_up(connection)
            thread.join()

    def _replace(self, packed: Packed | None) -> None:
        with self._changed:
            self._packed = None  # no new transfer begins
            if not self._changed.wait_for(lambda: not self._num_sending, self.meeting.deadline_s):
                for engine in self._engines.values():
                    if engine.is_served:
                        log.warning("engine_given_up deadline_s=%g", self.meeting.deadline_s)
                        engine.hang_up()
                self._changed.wait_for(lambda: not self._num_sending)
            self._packed = packed

    # -- in a thread of each connection

    def _serve(self, connection: socket.socket) -> None:
        thread = threading.current_thread()
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            self._serving[thread] = connection
        try:
            hello = receive_message(connection, deadline_s=self.meeting.deadline_s)
            if "rank" in hello:
                self._take_worker(connection, hello)
            else:
                self._serve_engine(connection, hello)
        except (OSError, RLError, KeyError, RuntimeError) as error:
            log.warning("weights_not_sent error=%r", error)
            connection.close()
        finally:
            with self._changed:
                del self._serving[thread]

    def _take_worker(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        with self._changed:
            engine = self._engines[str(hello["engine"])]
            rank = _number(hello, "rank", most=engine.num_workers)
            if rank in engine.workers:
                raise TransferError(f"a worker of rank {rank} is already connected")
            engine.workers[rank] = connection
            self._listen_while_needed()
            self._changed.notify_all()

    def _serve_engine(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        name = str(hello["engine"])
        engine = _Engine(connection, num_workers=_number(hello, "num_workers", most=MAX_WORKERS))
        with self._changed:
            self._engines[name] = engine
        try:
            while True:
                try:
                    request = receive_message(connection, deadline_s=math.inf)
                except OSError:
                    return  # it has ended or was disconnected
                self._answer(name, engine, request)
        finally:
            with self._changed:
                del self._engines[name]
                self._listen_while_needed()
            engine.close()

    def _answer(self, name: str, engine: _Engine, request: Mapping[str, Any]) -> None:
        """Send the current version to one engine; its workers detect errors themselves."""
        deadline_s = self.meeting.deadline_s
        with self._changed:
            packed = self._packed
            refusal = _refusal(request, packed)
            self._num_sending += 1
            engine.is_served = True
        try:
            send_message(engine.connection, {"refusal": refusal}, deadline_s=deadline_s)
            if packed is None or refusal is not None:
                return
            if not receive_message(engine.connection, deadline_s=deadline_s)["goes_on"]:
                return  # another sender refused
            if engine.group is None:
                engine.group = self._meet(name, engine)
            engine.group.send(packed[1]())
        finally:
            with self._changed:
                self._num_sending -= 1
                engine.is_served = False
                self._changed.notify_all()

    def _meet(self, name: str, engine: _Engine) -> BroadcastGroup:
        ends_at = time.monotonic() + self.meeting.deadline_s
        with self._changed:
            while not engine.is_whole and time.monotonic() < ends_at and not is_readable(engine.connection):
                self._changed.wait(POLL_S)  # disconnection is not signalled
            if not engine.is_whole:
                raise TransferError(
                    f"{len(engine.workers)} of {engine.num_workers} workers of engine {name} connected before it "
                    f"disconnected, or within {self.meeting.deadline_s:g} s"
                )
        workers = [connection for _, connection in sorted(engine.workers.items())]
        return BroadcastGroup(
            self.meeting,
            name,
            rank=SENDER,
            size=len(workers) + 1,
            device=self._device,
            connections=workers,
            engine=engine.connection,
        )

    def _listen_while_needed(self) -> None:
        """Open or close the listener; the caller must have acquired `_changed`."""
        num_here = sum(engine.is_whole for engine in self._engines.values())
        self._listener.set_open(self._num_receivers is None or num_here < self._num_receivers)


def _number(hello: Mapping[str, Any], name: str, *, most: int) -> int:
    found = hello[name]
    if not isinstance(found, int) or not 1 <= found <= most:
        raise TransferError(f"{name} must be from 1 to {most}; found {found!r}")
    return found


def _refusal(request: Mapping[str, Any], packed: Packed | None) -> str | None:
    version = request.get("version")
    if packed is not None and packed[0] == version:
        return None
    offered = "none" if packed is None else f"version {packed[0]}"
    return f"weights of version {version} were requested; the sender has {offered}. Request the newest version."
