"""Weights over the network: the sender's side. TCP between CPUs, NCCL between GPUs.

A sender listens on one address, as long as a receiver is missing, for engines that know its secret, which travels
with the update through the role call. Each engine keeps a connection on which it asks for updates, and each of its
workers one on which it takes them: an engine that dies disturbs no other, and one that is started again takes the
current weights when it asks for them.
"""

import logging
import math
import secrets
import socket
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import torch

from rl_core.errors import DeadlineError, NotReadyError, RLError, TransferError
from rl_core.weights.broadcast_group import SENDER, BroadcastGroup, TensorSpec
from rl_core.weights.digests import digest_tensors
from rl_core.weights.secret_sockets import (
    SECRET_BYTES,
    Listener,
    connect,
    hang_up,
    receive_message,
    send_message,
)
from rl_core.weights.update import AdapterUpdate, Broadcast, WeightUpdate

__all__ = [
    "BroadcastGroup",
    "BroadcastReceiver",
    "BroadcastTransport",
    "TensorSpec",
]

log = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 256 * 2**20
MAX_WORKERS = 4096


class _Engine:
    """One receiver, as the sender knows it: the connection on which it asks, and those of its workers."""

    def __init__(self, connection: socket.socket, *, num_workers: int) -> None:
        self.connection, self.num_workers = connection, num_workers
        self.workers: dict[int, socket.socket] = {}
        self.group: BroadcastGroup | None = None

    @property
    def is_whole(self) -> bool:
        """True once all workers are there."""
        return len(self.workers) == self.num_workers

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        for connection in (self.connection, *self.workers.values()):
            connection.close()


class BroadcastTransport:
    """Sends tensors to engines in other processes and on other machines, in buckets.

    The tensors are copied to this process's memory: an engine that is started again takes them later, when the learner
    has stepped on.
    """

    def __init__(
        self,
        *,
        backend: Literal["tcp", "gloo", "nccl"] = "tcp",
        host: str = "127.0.0.1",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = 60.0,
        num_receivers: int | None = None,
    ) -> None:
        """Listen.

        Args:
            backend: "nccl" sends from the current GPU; every engine's worker must have another one. "gloo" is the
                earlier name of "tcp".
            host: This machine's address, as engines reach it; nothing listens on another one.
            bucket_bytes: Most bytes that travel at once.
            deadline_s: Longest wait for a receiver, in every step.
            num_receivers: Engines that are expected: once so many are connected, nothing listens until one is lost.
                None listens until the end.

        Raises:
            SettingsError: This machine has no such address.
        """
        secret = secrets.token_bytes(SECRET_BYTES)
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._engines: dict[str, _Engine] = {}
        self._packed: tuple[int, list[torch.Tensor]] | None = None
        self._num_receivers = num_receivers
        self._num_sending = 0
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._listener = Listener(host, secret, self._serve)
        self._meeting = Broadcast(
            backend=backend,
            host=host,
            port=self._listener.port,
            secret=secret.hex(),
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
        )

    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """See `WeightTransport.pack`; waits for engines that still take the last update."""
        if self._is_closed:
            raise NotReadyError("the weight transport is closed. Make a new one.")
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        digests = digest_tensors(copies)
        with self._changed:
            self._changed.wait_for(lambda: not self._num_sending)
            self._packed = version, list(copies.values())
        return WeightUpdate(version=version, digests=digests, broadcast=self._meeting, tied=dict(tied), adapter=adapter)

    def expect(self, num_receivers: int) -> None:
        """Change how many engines are expected."""
        with self._changed:
            self._num_receivers = num_receivers
            self._listen_while_needed()

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._listener.close()
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_sending)
            self._packed = None
            serving = dict(self._serving)
        for thread, connection in serving.items():
            hang_up(connection)
            thread.join()

    # -- in a thread of each connection

    def _serve(self, connection: socket.socket) -> None:
        thread = threading.current_thread()
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            self._serving[thread] = connection
        try:
            hello = receive_message(connection, deadline_s=self._meeting.deadline_s)
            if "rank" in hello:
                self._take_worker(connection, hello)
            else:
                self._serve_engine(connection, hello)
        except (OSError, RLError, KeyError) as error:
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
                raise TransferError(f"a worker of rank {rank} is there already")
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
                    return  # it has ended, or is ended
                self._answer(name, engine, request)
        finally:
            with self._changed:
                del self._engines[name]
                self._listen_while_needed()
            engine.close()

    def _answer(self, name: str, engine: _Engine, request: Mapping[str, Any]) -> None:
        """Send the current update to one engine; what goes wrong, the engine's workers notice by themselves."""
        with self._changed:
            packed = self._packed
            refusal = _refusal(request, packed)
            self._num_sending += 1
        try:
            send_message(engine.connection, {"refusal": refusal}, deadline_s=self._meeting.deadline_s)
            if packed is None or refusal is not None:
                return
            if engine.group is None:
                engine.group = self._meet(name, engine)
            engine.group.send(packed[1])
        finally:
            with self._changed:
                self._num_sending -= 1
                self._changed.notify_all()

    def _meet(self, name: str, engine: _Engine) -> BroadcastGroup:
        with self._changed:
            if not self._changed.wait_for(lambda: engine.is_whole, self._meeting.deadline_s):
                raise TransferError(
                    f"{len(engine.workers)} of {engine.num_workers} workers of engine {name} came within "
                    f"{self._meeting.deadline_s:g} s"
                )
        workers = [connection for _, connection in sorted(engine.workers.items())]
        return BroadcastGroup(
            self._meeting, name, rank=SENDER, size=len(workers) + 1, device=self._device, connections=workers
        )

    def _listen_while_needed(self) -> None:
        """`_changed` is held."""
        num_here = sum(engine.is_whole for engine in self._engines.values())
        self._listener.set_open(self._num_receivers is None or num_here < self._num_receivers)


class BroadcastReceiver:
    """An engine's side before its workers receive: it asks for an update, and hears whether it is served.

    Attributes:
        name: By which its workers meet the sender; a new one where the sender is met anew.
    """

    def __init__(self, *, num_workers: int) -> None:
        """Connect to nobody yet.

        Args:
            num_workers: That receive.
        """
        self.name = uuid.uuid4().hex
        self._num_workers = num_workers
        self._connection: socket.socket | None = None
        self._joined: Broadcast | None = None

    def announce(self, update: WeightUpdate) -> Broadcast:
        """Ask the sender for an update; when this returns, the workers meet it (`BroadcastGroup`).

        Raises:
            TransferError: The sender is gone, or sends another version.
            DeadlineError: It does not answer.
        """
        if update.broadcast is None:
            raise TransferError(f"weight update {update.version} is not one that is broadcast.")
        meeting = update.broadcast
        try:
            answer = self._ask(meeting, update.version)
        except TimeoutError as error:
            self.close()
            raise DeadlineError(
                f"the sender of weights at {meeting.host}:{meeting.port} gave no answer in {meeting.deadline_s:g} s."
            ) from error
        except OSError as error:
            self.close()
            raise TransferError(
                f"the sender of weight update {update.version} cannot be reached at {meeting.host}:{meeting.port}: "
                f"{error}. Keep its transport open until every engine has taken the update."
            ) from error
        if answer["refusal"] is not None:
            raise TransferError(str(answer["refusal"]))
        return meeting

    def close(self) -> None:
        """Leave the sender. Can be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, meeting: Broadcast, version: int) -> dict[str, Any]:
        if self._connection is not None and self._joined == meeting:
            with suppress(ConnectionError):  # the sender has given this engine up, as when an update failed
                return self._request(self._connection, meeting, version)
        self.close()
        self.name = uuid.uuid4().hex
        secret = bytes.fromhex(meeting.secret)
        self._connection = connect(meeting.host, meeting.port, secret, deadline_s=meeting.deadline_s)
        self._joined = meeting
        hello = {"engine": self.name, "num_workers": self._num_workers}
        send_message(self._connection, hello, deadline_s=meeting.deadline_s)
        return self._request(self._connection, meeting, version)

    def _request(self, connection: socket.socket, meeting: Broadcast, version: int) -> dict[str, Any]:
        send_message(connection, {"version": version}, deadline_s=meeting.deadline_s)
        return receive_message(connection, deadline_s=meeting.deadline_s)


def _number(hello: Mapping[str, Any], name: str, *, most: int) -> int:
    found = hello[name]
    if not isinstance(found, int) or not 1 <= found <= most:
        raise TransferError(f"{name} is 1 to {most}; found {found!r}")
    return found


def _refusal(request: Mapping[str, Any], packed: tuple[int, list[torch.Tensor]] | None) -> str | None:
    version = request.get("version")
    if packed is not None and packed[0] == version:
        return None
    offered = "none" if packed is None else f"version {packed[0]}"
    return f"the sender was asked for weights of version {version}; it has {offered}. Take the newer ones."
