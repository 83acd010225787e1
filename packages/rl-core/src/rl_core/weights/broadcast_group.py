"""What a sender and the workers of one engine exchange: requests of versions, and tensors in buckets of bounded size.

Buckets use the connections on which workers proved that they know the transport's secret, or NCCL, whose unique id is
exchanged on these connections.

The tensors' bytes form one stream, cut into buckets of equal size; only the last bucket is smaller. A large tensor
spans several buckets; small ones share one. Each side allocates two buckets and one tensor at a time: one bucket is
filled or emptied during the transfer of the other.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import cycle
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rl_core.errors import DeadlineError, TransferError
from rl_core.weights.messages import Answer, NcclId, VersionRequest, decode_answer, decode_nccl_id, decode_request
from rl_core.weights.secret_sockets import (
    hang_up,
    receive,
    receive_into,
    receive_message,
    send,
    send_message,
)
from rl_core.weights.update import Broadcast

SENDER = 0
PAUSE_S = 0.0005
READY = b"+"


class BroadcastGroup:
    """A sender (rank 0) and one engine's workers, connected while both are alive."""

    def __init__(
        self,
        meeting: Broadcast,
        name: str,
        connections: Sequence[socket.socket],
        *,
        rank: int,
        size: int,
        device: torch.device,
    ) -> None:
        """Join the group.

        Args:
            meeting: Address and options of the sender.
            name: Name of the group.
            connections: The sender's to its workers by rank, or a worker's to the sender.
            rank: 0 sends, all others receive.
            size: Number of members.
            device: Device of the buckets.

        Raises:
            TransferError: The sender sends by NCCL, which this member cannot join.
        """
        self._meeting, self._name, self._device = meeting, name, device
        self._is_sender = rank == SENDER
        self._connections = list(connections)
        self._group: Any = None
        if meeting.backend != "nccl":
            return
        if device.type == "cpu":
            self.close()
            raise TransferError(
                f"weights are sent from a GPU at {meeting.host} by NCCL, but this member of broadcast group {name!r} "
                'is on a CPU. Start the engine on a GPU, or set weights.transport = "tcp" or "file".'
            )
        try:
            self._store = UniqueIdStore(self._connections, meeting)  # torch does not keep a reference
            self._group = _nccl_group(meeting, self._store, rank, size)
        except (RuntimeError, OSError) as error:
            self.close()
            raise TransferError(
                f"{size} members of broadcast group {name!r} did not connect at {meeting.host}:{meeting.port} within "
                f"{meeting.deadline_s:g} s; rank {rank} failed with: {error}. Check that all members are running."
            ) from error

    def ask(self, version: int) -> str | None:
        """Request a version as a worker.

        Returns:
            Why the sender refuses; None if it sends the version once all workers receive.

        Raises:
            OSError: The sender has ended; TimeoutError if it does not answer.
        """
        (connection,) = self._connections
        send_message(connection, VersionRequest(version), deadline_s=self._meeting.deadline_s)
        return receive_message(connection, decode_answer, deadline_s=self._meeting.deadline_s).refusal

    def asked(self) -> int:
        """Wait until every worker has requested a version, and return it.

        Raises:
            OSError: A worker has ended, or they request different versions.
        """
        deadline_s = self._meeting.deadline_s
        requests = [receive_message(one, decode_request, deadline_s=deadline_s) for one in self._each_ready()]
        versions = {request.version for request in requests}
        if len(versions) != 1:
            raise ConnectionError(f"workers of one engine must request one version; found {sorted(versions)}")
        return versions.pop()

    def answer(self, refusal: str | None) -> None:
        """Answer every worker's request; raises as `ask`."""
        for connection in self._connections:
            send_message(connection, Answer(refusal), deadline_s=self._meeting.deadline_s)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors in order; receivers must receive the same number of tensors of the same sizes.

        Raises:
            TransferError: A receiver has ended.
            DeadlineError: A receiver stopped receiving.
        """
        with ThreadPoolExecutor(1, "send weights") as thread:
            for _ in self._transferred(self._filled(tensors), thread):
                pass

    def receive(self, sizes: Sequence[int], thread: Executor) -> Iterator[torch.Tensor]:
        """Receive tensor by tensor, as [size] uint8 on the group's device.

        Args:
            sizes: Size of each tensor in bytes, in order.
            thread: Executor with a single thread, shared by all groups of a worker, so that all workers receive from
                the senders in the same order.

        Raises:
            TransferError: The sender has ended.
            DeadlineError: The sender stopped sending.
        """
        coming = self._transferred(self._empty(sum(sizes)), thread)
        waiting = torch.empty(0, dtype=torch.uint8)
        for size in sizes:
            values = torch.empty(size, dtype=torch.uint8, device=self._device)
            rest = values
            while len(rest):
                if not len(waiting):
                    waiting = next(coming)
                count = min(len(rest), len(waiting))
                rest[:count].copy_(waiting[:count])
                rest, waiting = rest[count:], waiting[count:]
            yield values

    def hang_up(self) -> None:
        """Disconnect from the other members, so that no thread waits for them any longer."""
        for connection in self._connections:
            hang_up(connection)

    def close(self) -> None:
        """Leave the group at any time. Can be called twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self.hang_up()
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _transferred(self, buckets: Iterable[torch.Tensor], thread: Executor) -> Iterator[torch.Tensor]:
        """Send or receive buckets, and yield each one while the next one is under way."""
        under_way: deque[tuple[torch.Tensor, Future[None]]] = deque()
        for bucket in buckets:
            under_way.append((bucket, self._start(bucket, thread)))
            if len(under_way) == 2:
                yield _done(*under_way.popleft())
        for started in under_way:
            yield _done(*started)

    def _filled(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield buckets of the tensors' bytes."""
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

    def _empty(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Yield buckets of a total size."""
        for bucket in self._two_buckets():
            if not size_bytes:
                return
            yield bucket[:size_bytes]
            size_bytes -= min(size_bytes, len(bucket))

    def _two_buckets(self) -> Iterator[torch.Tensor]:
        """Alternate between two buckets: on the device for NCCL, in host memory for sockets."""
        device = torch.device("cpu") if self._group is None else self._device
        return cycle([torch.empty(self._meeting.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)])

    def _start(self, bucket: torch.Tensor, thread: Executor) -> Future[None]:
        """Send or receive a bucket after the current stream's work on it."""
        if bucket.device.type == "cpu":
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
                return
            transfer = send if self._is_sender else receive_into
            for connection in self._connections:
                transfer(connection, values.numpy().data, deadline_s=self._meeting.deadline_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"a bucket of weights waited {self._meeting.deadline_s:g} s for the other members of broadcast group "
                f"{self._name!r}. Check these members, or raise the deadline."
            ) from error
        except (RuntimeError, OSError) as error:
            raise TransferError(
                f"a bucket of {len(values)} bytes could not be transferred in broadcast group {self._name!r}: "
                f"{error}. Another member ended; restart it."
            ) from error

    def _agree(self) -> None:
        """Tell the sender that this worker is ready, or wait for all workers."""
        if not self._is_sender:
            send(self._connections[0], READY, deadline_s=self._meeting.deadline_s)
            return
        for connection in self._each_ready():
            receive(connection, len(READY), deadline_s=self._meeting.deadline_s)

    def _each_ready(self) -> Iterator[socket.socket]:
        """Yield each connection once its other side has sent something or ended; that may take any time."""
        waiting = list(self._connections)
        while waiting:
            ready = wait(waiting)
            yield from (connection for connection in waiting if connection in ready)
            waiting = [connection for connection in waiting if connection not in ready]

    def _wait(self, work: Any) -> None:
        """Wait for NCCL with a deadline; NCCL itself has no limit, and its watchdog would end the process."""
        ends_at = time.monotonic() + self._meeting.deadline_s
        while not work.is_completed():
            if time.monotonic() > ends_at:
                raise TimeoutError
            time.sleep(PAUSE_S)
        work.wait()


def _done(bucket: torch.Tensor, transfer: Future[None]) -> torch.Tensor:
    transfer.result()
    return bucket


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
            send_message(connection, NcclId(key, value), deadline_s=self._meeting.deadline_s)

    def get(self, key: str) -> bytes:
        """Receive the sender's value."""
        found = receive_message(self._connections[0], decode_nccl_id, deadline_s=self._meeting.deadline_s)
        if found.key != key:
            raise ConnectionError(f"expected NCCL's unique id {key!r}; found {found.key!r}")
        return found.value

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
