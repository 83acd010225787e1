"""Tensors from one sender to the workers of one engine, in buckets of bounded size.

They travel over the connections on which the workers have proved the transport's secret, or by NCCL, whose unique id
travels over these.

The tensors' bytes are one stream, cut into buckets of equal size; only the last is smaller. A tensor larger than a
bucket spans several, small ones share one. Both sides hold two buckets and one tensor at a time: one bucket is filled,
or emptied, while the other travels.
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
    """What a tensor is before it arrives.

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
        """Of its contiguous values."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class BroadcastGroup:
    """A sender (rank 0) and one engine's workers, connected as long as both live."""

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
        """Meet the others.

        Args:
            meeting: Where.
            name: What the members call the group.
            rank: 0 sends, the others receive.
            size: How many meet.
            device: Where buckets are.
            connections: Of the sender, to its workers by their ranks; a worker makes its own.
            engine: Of the sender, to the workers' engine, which says nothing while they receive, unless it ends.

        Raises:
            TransferError: The sender is gone, or sends by NCCL to a CPU.
        """
        if meeting.backend == "nccl" and device.type == "cpu":
            raise TransferError(
                f"weights come from a GPU at {meeting.host} by NCCL, and this member of broadcast group {name!r} is on "
                'a CPU. Start the engine on a GPU, or take weights.transport = "tcp" or "file".'
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
                self._store = UniqueIdStore(self._connections, meeting)  # torch itself does not keep it alive
                self._group = _nccl_group(meeting, self._store, rank, size)
        except (RuntimeError, OSError) as error:
            self.close()
            raise TransferError(
                f"{size} members of broadcast group {name!r} were to meet at {meeting.host}:{meeting.port} within "
                f"{meeting.deadline_s:g} s; rank {rank} found: {error}. See whether all of them live."
            ) from error

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors, in order; receivers take as many, of the same sizes.

        Raises:
            TransferError: A receiver is gone.
            DeadlineError: A receiver takes nothing any more.
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
        """Receive what is sent, tensor by tensor.

        Args:
            specs: What comes, in order.
            thread: Of one thread alone, in which buckets are received. Workers that receive from several senders share
                one, so that all of them turn to the senders in the same order; None makes one.

        Raises:
            TransferError: The sender is gone.
            DeadlineError: The sender gives nothing any more.
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
        """Leave the group, whatever is under way. Can be called twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        connections, self._connections = self._connections, []
        for connection in connections:
            hang_up(connection)  # a thread may wait on it
            connection.close()

    def _filled(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Buckets of the tensors' bytes; one is filled while the one before may travel."""
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
        """Buckets with so many bytes; one travels while the one before may be emptied."""
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
        """Two in turn; those of NCCL are on the device, sockets read and write the host's memory."""
        device = torch.device("cpu") if self._group is None else self._device
        return cycle([torch.empty(self._meeting.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)])

    def _start(self, bucket: torch.Tensor, thread: Executor) -> Future[None]:
        """Let a bucket travel, after what the present stream does with it."""
        if not bucket.is_cuda:
            return thread.submit(self._broadcast, bucket)
        stream = torch.cuda.current_stream(bucket.device)

        def after_stream() -> None:
            with torch.cuda.stream(stream):
                self._broadcast(bucket)

        return thread.submit(after_stream)

    def _broadcast(self, values: torch.Tensor) -> None:
        """Move one bucket; each worker says when it is ready, so that nobody's deadline counts what others send it."""
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
                f"a bucket of {len(values)} bytes did not get through broadcast group {self._name!r}: {error}. "
                "Another member ended; start it again."
            ) from error

    def _agree(self) -> None:
        for connection in self._connections:
            if not self._is_sender:
                send(connection, READY, ends_at=time.monotonic() + self._meeting.deadline_s)
                continue
            wait_readable(connection, unless=self._engine)  # while both live, or until the sender gives them up
            receive_into(connection, memoryview(bytearray(len(READY))), ends_at=math.inf)

    def _pass_on(self, content: memoryview) -> None:
        ends_at = time.monotonic() + self._meeting.deadline_s
        for connection in self._connections:
            if self._is_sender:
                send(connection, content, ends_at=ends_at)
            else:
                receive_into(connection, content, ends_at=ends_at)

    def _wait(self, work: Any) -> None:
        """NCCL itself waits without a limit, and its watchdog would end the process."""
        ends_at = time.monotonic() + self._meeting.deadline_s
        while not work.is_completed():
            if time.monotonic() > ends_at:
                raise self._late()
            time.sleep(PAUSE_S)
        work.wait()

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"a bucket of weights waited {self._meeting.deadline_s:g} s for the other members of broadcast group "
            f"{self._name!r}. See what they do, or give a longer deadline."
        )


class UniqueIdStore(Store):
    """What a process group of NCCL needs: the sender's unique id, which lets its holder join, at every worker.

    It travels over the connections on which the secret was proved, and is kept nowhere.
    """

    def __init__(self, connections: Sequence[socket.socket], meeting: Broadcast) -> None:
        """Name the connections: of the sender to all workers, of a worker to the sender."""
        super().__init__()
        self._connections, self._meeting = list(connections), meeting

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch gives bytes
        """Send a value to every worker."""
        for connection in self._connections:
            send_message(connection, {"key": key, "value": value.hex()}, deadline_s=self._meeting.deadline_s)

    def get(self, key: str) -> bytes:
        """Receive the sender's value."""
        message = receive_message(self._connections[0], deadline_s=self._meeting.deadline_s)
        if message.get("key") != key:
            raise ConnectionError(f"NCCL's unique id {key!r} was to come; found {message.get('key')!r}")
        return bytes.fromhex(message["value"])

    def check(self, keys: Sequence[str]) -> bool:  # noqa: ARG002 - torch's own signature
        """No: torch's watchdog asks whether another member wants a dump."""
        return False


def _nccl_group(meeting: Broadcast, store: Store, rank: int, size: int) -> Any:
    if meeting.host in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # who meets on loopback opens no other interface
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # its watchdog ends the process; here each bucket has its deadline
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _from_sender() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SENDER, 0
    return options
