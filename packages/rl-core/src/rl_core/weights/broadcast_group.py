"""Tensors from one sender to the workers of one engine, in buckets of bounded size, over torch's process groups.

The tensors' bytes are one stream, cut into buckets of equal size; only the last is smaller. A tensor larger than a
bucket spans several, small ones share one. Both sides hold one bucket and one tensor at a time.
"""

import math
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rl_core.errors import DeadlineError, TransferError
from rl_core.weights.update import Broadcast

SENDER = 0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAUSE_S = 0.0005


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
    """A process group of a sender (rank 0) and one engine's workers, kept as long as both live."""

    def __init__(self, meeting: Broadcast, name: str, *, rank: int, size: int, device: torch.device) -> None:
        """Meet the others.

        Args:
            meeting: Where.
            name: What the members call the group.
            rank: 0 sends, the others receive.
            size: How many meet.
            device: Where buckets are.

        Raises:
            TransferError: The others did not come in time.
        """
        self._meeting, self._name, self._device = meeting, name, device
        try:
            store = PrefixStore(name, open_store(meeting))
            self._group: Any = _process_group(meeting, store, rank, size)
        except RuntimeError as error:
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
        bucket, filled = self._new_bucket(), 0
        for tensor in tensors:
            rest = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            while len(rest):
                count = min(len(rest), len(bucket) - filled)
                bucket[filled : filled + count].copy_(rest[:count])
                rest, filled = rest[count:], filled + count
                if filled == len(bucket):
                    self._broadcast(bucket)
                    filled = 0
        if filled:
            self._broadcast(bucket[:filled])

    def receive(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive what is sent, tensor by tensor.

        Raises:
            TransferError: The sender is gone.
            DeadlineError: The sender gives nothing any more.
        """
        specs = list(specs)
        bucket, left = self._new_bucket(), sum(spec.size_bytes for spec in specs)
        waiting = bucket[:0]
        for spec in specs:
            values = torch.empty(spec.size_bytes, dtype=torch.uint8, device=self._device)
            rest = values
            while len(rest):
                if not len(waiting):
                    waiting = bucket[: min(len(bucket), left)]
                    self._broadcast(waiting)
                    left -= len(waiting)
                count = min(len(rest), len(waiting))
                rest[:count].copy_(waiting[:count])
                rest, waiting = rest[count:], waiting[count:]
            yield spec.name, values.view(getattr(torch, spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        """Leave the group, whatever is under way. Can be called twice."""
        group, self._group = self._group, None
        if group is not None and self._meeting.backend == "nccl":
            group.abort()

    def _new_bucket(self) -> torch.Tensor:
        return torch.empty(self._meeting.bucket_bytes, dtype=torch.uint8, device=self._device)

    def _broadcast(self, values: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        started = time.monotonic()
        try:
            work = self._group.broadcast([values], options)
            if self._meeting.backend == "nccl":
                self._wait(work)
            else:
                work.wait(timedelta(seconds=self._meeting.deadline_s))
        except RuntimeError as error:
            if time.monotonic() - started >= self._meeting.deadline_s:
                raise self._late() from error
            raise TransferError(
                f"a bucket of {len(values)} bytes did not get through broadcast group {self._name!r}: {error}. "
                "Another member ended; start it again."
            ) from error

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


def open_store(meeting: Broadcast) -> TCPStore:
    """The sender's store, from anywhere.

    Raises:
        RuntimeError: Nobody is there.
    """
    wait = timedelta(seconds=meeting.deadline_s)
    return TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=wait)


def _process_group(meeting: Broadcast, store: Store, rank: int, size: int) -> Any:
    wait = timedelta(seconds=meeting.deadline_s)
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # its watchdog ends the process; here each bucket has its deadline
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    host = {"hostname": meeting.host} if meeting.host in LOOPBACK else {}
    gloo._devices = [
        dist.ProcessGroupGloo.create_device(**host) if host else dist.ProcessGroupGloo.create_default_device()
    ]
    gloo._timeout = wait
    return dist.ProcessGroupGloo(store, rank, size, gloo)
