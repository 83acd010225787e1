"""The sender of weights over the network: it offers rectangles of tensors, listens for engines and sends to each.

It listens on one address while an engine is missing, for workers that know its secret, which they receive with the
update through the role call. The workers of an engine are a group, which asks for a version and receives it on the same
connections. A dead engine does not affect others, and a restarted one receives the current weights on request.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Literal, NamedTuple

import torch

from rl_core.devices import own_device
from rl_core.errors import NotReadyError, RLError, SettingsError, TransferError
from rl_core.record_fields import record, settings_record
from rl_core.weights.broadcast_group import SENDER, BroadcastGroup
from rl_core.weights.messages import WorkerHello, decode_hello
from rl_core.weights.secret_sockets import SECRET_BYTES, SecretListener, hang_up, receive_message
from rl_core.weights.update import Broadcast, Rectangle, WeightSource

log = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 256 * 2**20


@settings_record
class SenderOptions:
    """Options of a weight sender.

    Attributes:
        backend: "nccl" sends from the current GPU; every engine worker must use another GPU.
        host: Address of this machine that engines can reach; the sender listens only there.
        bucket_bytes: Maximum number of bytes in flight.
        deadline_s: Maximum wait in seconds for a receiver, per step.
        num_receivers: Number of expected engines: once all are connected, nothing listens until one is lost. None
            always listens.
    """

    backend: Literal["tcp", "nccl"] = "tcp"
    host: str = "127.0.0.1"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    deadline_s: float = 60.0
    num_receivers: int | None = None


@record
class HeldRectangle:
    """A rectangle of a tensor, stored by one sender.

    Attributes:
        rectangle: Position and size.
        shape: Shape of the whole tensor.
        read: Returns its elements, contiguous; can be called repeatedly.
    """

    rectangle: Rectangle
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "HeldRectangle":
        """A rectangle that is a whole tensor."""
        shape = tuple(tensor.shape)
        return cls(rectangle=Rectangle(name, (0,) * len(shape), shape), shape=shape, read=lambda: tensor)


class _Offer(NamedTuple):
    version: int
    held: Sequence[HeldRectangle]


class WeightSender:
    """Sends one version in buckets to engines in other processes and on other machines, until the next version.

    Attributes:
        meeting: Address and options for engines, once it listens.
    """

    meeting: Broadcast

    def __init__(self, name: str = "the sender of weights") -> None:
        """Initialize without listening.

        Args:
            name: Name for error messages, such as "rank 1 of the learner".
        """
        self._name = name
        self._listener: SecretListener | None = None
        self._num_receivers: int | None = None
        self._joining: dict[str, dict[int, socket.socket]] = {}
        self._groups: set[str] = set()
        self._served: set[BroadcastGroup] = set()
        self._offer: _Offer | None = None
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def listen(self, options: SenderOptions) -> None:
        """Start listening; if it has started, only set the number of expected engines, if the options have one.

        Raises:
            SettingsError: This machine does not have the address, or has no GPU for NCCL.
        """
        if self._listener is not None or self._is_closed:
            if options.num_receivers is not None:
                self.expect(options.num_receivers)
            return
        is_nccl = options.backend == "nccl"
        if is_nccl and own_device().type == "cpu":
            raise SettingsError(
                'weights.transport = "nccl" sends weights from a GPU, but torch finds none. Set weights.transport = '
                '"tcp" or "file".'
            )
        self._device = own_device() if is_nccl else torch.device("cpu")
        self._num_receivers = options.num_receivers
        secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = SecretListener(options.host, secret, self._serve)
        self.meeting = Broadcast(
            backend=options.backend,
            host=options.host,
            port=self._listener.port,
            secret=secret.hex(),
            bucket_bytes=options.bucket_bytes,
            deadline_s=options.deadline_s,
        )

    def offer(self, held: Sequence[HeldRectangle], *, version: int) -> WeightSource:
        """Send these rectangles on request from now on.

        Engines that are still receiving the previous version have until the deadline to finish.

        Args:
            held: Rectangles in the order of the tensors, read for each engine in its thread; they must not change until
                withdrawn.
            version: Policy version.

        Raises:
            NotReadyError: The sender is closed.
        """
        if self._is_closed:
            raise NotReadyError("the weight transport is closed. Create a new one.")
        self._replace(_Offer(version, held))
        return WeightSource(sender=self._name, meeting=self.meeting, rectangles=[one.rectangle for one in held])

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
        if self._listener is not None:
            self._listener.close()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._replace(None)
        with self._changed:
            serving = dict(self._serving)
        for thread, connection in serving.items():
            hang_up(connection)
            thread.join()

    def _replace(self, offer: _Offer | None) -> None:
        with self._changed:
            self._offer = None  # no new transfer begins
            if self._served and not self._changed.wait_for(self._is_idle, self.meeting.deadline_s):
                for group in self._served:
                    log.warning("engine_given_up deadline_s=%g", self.meeting.deadline_s)
                    group.hang_up()
                self._changed.wait_for(self._is_idle)
            self._offer = offer

    def _is_idle(self) -> bool:
        return not self._served

    # -- in a thread of each connection

    def _serve(self, connection: socket.socket) -> None:
        thread = threading.current_thread()
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            self._serving[thread] = connection
        try:
            hello = receive_message(connection, decode_hello, deadline_s=self.meeting.deadline_s)
            workers = self._joined(connection, hello)
            if workers:
                self._serve_group(hello.group, workers)
        except (OSError, RLError, RuntimeError) as error:
            log.warning("weights_not_sent error=%r", error)
            connection.close()
        finally:
            with self._changed:
                del self._serving[thread]

    def _joined(self, connection: socket.socket, hello: WorkerHello) -> Sequence[socket.socket]:
        """Return all workers of a group, by rank, in the thread of the last one; the others' threads end."""
        name, deadline_s = hello.group, self.meeting.deadline_s
        with self._changed:
            here = self._joining.get(name, {})
            if name in self._groups or hello.rank in here or hello.rank > hello.num_workers:
                raise TransferError(f"worker {hello.rank} of {hello.num_workers} is not expected in group {name}")
            here[hello.rank] = connection
            if len(here) == hello.num_workers:
                self._joining.pop(name, None)
                self._groups.add(name)
                self._listen_while_needed()
                self._changed.notify_all()
                return [worker for _, worker in sorted(here.items())]
            self._joining[name] = here
            self._changed.wait_for(lambda: self._joining.get(name) is not here or self._is_closed, deadline_s)
            if self._joining.get(name) is here:
                del self._joining[name]
                for worker in here.values():
                    worker.close()
                raise TransferError(f"{len(here)} of {hello.num_workers} workers connected within {deadline_s:g} s")
            return []

    def _serve_group(self, name: str, workers: Sequence[socket.socket]) -> None:
        size, device = len(workers) + 1, self._device
        try:
            with closing(BroadcastGroup(self.meeting, name, workers, rank=SENDER, size=size, device=device)) as group:
                while True:
                    try:
                        version = group.asked()
                    except OSError:
                        return  # it has ended or was disconnected
                    self._answer(group, version)
        finally:
            with self._changed:
                self._groups.remove(name)
                self._listen_while_needed()

    def _answer(self, group: BroadcastGroup, version: int) -> None:
        """Send the current version to one engine; its workers detect errors themselves."""
        with self._changed:
            offer = self._offer
            self._served.add(group)
        try:
            refusal = _refusal(version, offer)
            group.answer(refusal)
            if offer is not None and refusal is None:
                group.send(one.read() for one in offer.held)
        finally:
            with self._changed:
                self._served.remove(group)
                self._changed.notify_all()

    def _listen_while_needed(self) -> None:
        """Open or close the listener; the caller must have acquired `_changed`."""
        if self._listener is not None:
            self._listener.set_open(self._num_receivers is None or len(self._groups) < self._num_receivers)


def _refusal(version: int, offer: _Offer | None) -> str | None:
    if offer is not None and offer.version == version:
        return None
    offered = "none" if offer is None else f"version {offer.version}"
    return f"weights of version {version} were requested; the sender has {offered}. Request the newest version."
