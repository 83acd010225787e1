"""Tensors from one sender to the workers of one engine, in buckets of bounded size.

Buckets use the connections on which workers proved that they know the transport's secret, or NCCL, whose unique id is
exchanged on these connections.

The tensors' bytes form one stream, cut into buckets of equal size; only the last bucket is smaller. A large tensor
spans several buckets; small ones share one. Each side allocates two buckets and one tensor at a time: one bucket is
filled or emptied during the transfer of the other.
"""

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rl_core.errors import DeadlineError, TransferError
from rl_core.weights.secret_sockets import (
    connect,
    hang_up,
    receive_into,
    receive_message,
    send,
    send_message,
    wait_readable,
)
from rl_core.weights.update import Broadcast

SENDER = 0
PAUSE_S = 0.0005
READY = b"+"


class TensorSpec(NamedTuple):
    """Name, shape and dtype of a tensor before it arrives.

    Attributes:
        name: Its Hugging Face name.
        shape: Its shape.
        dtype: torch dtype name without prefix, such as "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Size of its contiguous values in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class BroadcastGroup:
    """A sender (rank 0) and one engine's workers, connected while both are alive."""

    def __init__(
        self,
        meeting: Broadcast,
        name: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        connections: Sequence[socket.socket] = (),
        engine: socket.socket | None = None,
    ) -> None:
        """Connect to the other members.

        Args:
            meeting: Address and options of the sender.
            name: Name of the group.
            rank: 0 sends, all others receive.
            size: Number of members.
            device: Device of the buckets.
            connections: Sender only: connections to its workers by rank; a worker creates its own.
            engine: Sender only: connection to the workers' engine, which sends nothing while they receive, unless it
                ends.

        Raises:
            TransferError: The sender has ended, or sends by NCCL to a CPU.
        """
        if meeting.backend == "nccl" and device.type == "cpu":
            raise TransferError(
                f"weights are sent from a GPU at {meeting.host} by NCCL, but this member of broadcast group {name!r} "
                'is on a CPU. Start the engine on a GPU, or set weights.transport = "tcp" or "file".'
            )
        self._meeting, self._name, self._device = meeting, name, device
        self._is_sender = rank == SENDER
        self._connections = list(connections)
        self._engine = engine
        self._group: Any = None
        try:
            if not self._is_sender:
                secret = bytes.fromhex(meeting.secret)
                self._connections = [connect(meeting.host, meeting.port, secret, deadline_s=meeting.deadline_s)]
                send_message(self._connections[0], {"engine": name, "rank": rank}, deadline_s=meeting.deadline_s)
            if meeting.backend == "nccl":
                self._store = UniqueIdStore(self._connections, meeting)  # torch does not keep a reference
                self._group = _nccl_group(meeting, self._store, rank, size)
        except (RuntimeError, OSError) as error:
            self.close()
            raise TransferError(
                f"{size} members of broadcast group {name!r} did not connect at {meeting.host}:{meeting.port} within "
                f"{meeting.deadline_s:g} s; rank {rank} failed with: {error}. Check that all members are running."
            ) from error

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors in order; receivers must receive the same number of tensors of the same sizes.

        Raises:
            TransferError: A receiver has ended.
            DeadlineError: A receiver stopped receiving.
        """
        with ThreadPoolExecutor(1, "send weights") as thread:
            under_way: Future[None] | None = None
            for bucket in self._filled(tensors):
                following = self._start(bucket, thread)
                if under_way is not None:
                    under_way.result()
                under_way = following
            if under_way is not None:
                under_way.result()

    def receive(
        self, specs: Iterable[TensorSpec], *, thread: Executor | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive tensor by tensor.

        Args:
            specs: The tensors, in order.
            thread: Executor with a single thread that receives buckets. Workers that receive from several senders share
                one, so that all workers receive from the senders in the same order; None creates one.

        Raises:
            TransferError: The sender has ended.
            DeadlineError: The sender stopped sending.
        """
        specs = list(specs)
        with ThreadPoolExecutor(1, "receive weights") as own:
            coming = self._coming(sum(spec.size_bytes for spec in specs), thread or own)
            waiting = torch.empty(0, dtype=torch.uint8)
            for spec in specs:
                values = torch.empty(spec.size_bytes, dtype=torch.uint8, device=self._device)
                rest = values
                while len(rest):
                    if not len(waiting):
                        waiting = next(coming)
                    count = min(len(rest), len(waiting))
                    rest[:count].copy_(waiting[:count])
                    rest, waiting = rest[count:], waiting[count:]
                yield spec.name, values.view(getattr(torch, spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        """Leave the group at any time. Can be called twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        connections, self._connections = self._connections, []
        for connection in connections:
            hang_up(connection)  # unblocks a waiting thread
            connection.close()

    def _filled(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield buckets of the tensors' bytes; the next one is filled during the transfer of the previous one."""
        buckets = self._two_buckets()
        bucket, filled = next(buckets), 0
        for tensor in tensors:
            rest = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            while len(rest):
                count = min(len(rest), len(bucket) - filled)
                bucket[filled : filled + count].copy_(rest[:count])
                rest, filled = rest[count:], filled + count
                if filled == len(bucket):
                    yield bucket
                    bucket, filled = next(buckets), 0
        if filled:
            yield bucket[:filled]

    def _coming(self, size_bytes: int, thread: Executor) -> Iterator[torch.Tensor]:
        """Yield buckets of a total size; the next one is received while the caller empties the previous one."""
        under_way: tuple[torch.Tensor, Future[None]] | None = None
        for bucket in self._two_buckets():
            following = bucket[:size_bytes]
            size_bytes -= len(following)
            started = (following, self._start(following, thread)) if len(following) else None
            if under_way is not None:
                under_way[1].result()
                yield under_way[0]
            if started is None:
                return
            under_way = started

    def _two_buckets(self) -> Iterator[torch.Tensor]:
        """Alternate between two buckets: on the device for NCCL, in host memory for sockets."""
        device = torch.device("cpu") if self._group is None else self._device
        return cycle([torch.empty(self._meeting.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)])

    def _start(self, bucket: torch.Tensor, thread: Executor) -> Future[None]:
        """Send or receive a bucket after the current stream's work on it."""
        if not bucket.is_cuda:
            return thread.submit(self._broadcast, bucket)
        stream = torch.cuda.current_stream(bucket.device)

        def after_stream() -> None:
            with torch.cuda.stream(stream):
                self._broadcast(bucket)

        return thread.submit(after_stream)

    def _broadcast(self, values: torch.Tensor) -> None:
        """Transfer one bucket. Each worker reports when it is ready, so deadlines exclude time spent on others."""
        try:
            if not self._connections:
                raise ConnectionError("this member has left the group")
            self._agree()
            if self._group is not None:
                self._wait(self._group.broadcast([values], _from_sender()))
            else:
                self._pass_on(values.numpy().data)
        except TimeoutError as error:
            raise self._late() from error
        except (RuntimeError, OSError) as error:
            raise TransferError(
                f"a bucket of {len(values)} bytes could not be transferred in broadcast group {self._name!r}: "
                f"{error}. Another member ended; restart it."
            ) from error

    def _agree(self) -> None:
        for connection in self._connections:
            if not self._is_sender:
                send(connection, READY, ends_at=time.monotonic() + self._meeting.deadline_s)
                continue
            wait_readable(connection, unless=self._engine)  # no deadline: until either ends or the sender gives up
            receive_into(connection, memoryview(bytearray(len(READY))), ends_at=math.inf)

    def _pass_on(self, content: memoryview) -> None:
        ends_at = time.monotonic() + self._meeting.deadline_s
        for connection in self._connections:
            if self._is_sender:
                send(connection, content, ends_at=ends_at)
            else:
                receive_into(connection, content, ends_at=ends_at)

    def _wait(self, work: Any) -> None:
        """Wait for NCCL with a deadline; NCCL itself has no limit, and its watchdog would end the process."""
        ends_at = time.monotonic() + self._meeting.deadline_s
        while not work.is_completed():
            if time.monotonic() > ends_at:
                raise self._late()
            time.sleep(PAUSE_S)
        work.wait()

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"a bucket of weights waited {self._meeting.deadline_s:g} s for the other members of broadcast group "
            f"{self._name!r}. Check these members, or raise the deadline."
        )


class UniqueIdStore(Store):
    """Store for NCCL's process group: passes the sender's unique id, which grants access, to every worker.

    It uses the connections on which the secret was proved, and stores nothing.
    """

    def __init__(self, connections: Sequence[socket.socket], meeting: Broadcast) -> None:
        """Set the connections: the sender's to all workers, or a worker's to the sender."""
        super().__init__()
        self._connections, self._meeting = list(connections), meeting

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch passes bytes
        """Send a value to every worker."""
        for connection in self._connections:
            send_message(connection, {"key": key, "value": value.hex()}, deadline_s=self._meeting.deadline_s)

    def get(self, key: str) -> bytes:
        """Receive the sender's value."""
        message = receive_message(self._connections[0], deadline_s=self._meeting.deadline_s)
        if message.get("key") != key:
            raise ConnectionError(f"expected NCCL's unique id {key!r}; found {message.get('key')!r}")
        return bytes.fromhex(message["value"])

    def check(self, keys: Sequence[str]) -> bool:  # noqa: ARG002 - torch's own signature
        """Return False: torch's watchdog asks whether another member requests a dump."""
        return False


def _nccl_group(meeting: Broadcast, store: Store, rank: int, size: int) -> Any:
    if meeting.host in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # on loopback, open no other interface
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # disables its watchdog; each bucket has a deadline
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _from_sender() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SENDER, 0
    return options
