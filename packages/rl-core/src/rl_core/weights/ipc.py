"""Weights to an engine process on the same GPU, which opens the sender's memory without a copy through the host.

The tensors are copied side by side into buckets, so that the learner can continue and one handle covers many tensors.
Handles are those of `torch.multiprocessing.reductions`, but they are sent as plain values: nothing from outside is
unpickled.
"""

import secrets
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_core.errors import EngineError, NotReadyError, SettingsError, TransferError, WeightsGoneError
from rl_core.files import locked_folder, require_plain
from rl_core.weights.digests import TensorDigest, digest_tensors, to_host
from rl_core.weights.transports import FOLDER_PREFIX, SHARED_MEMORY
from rl_core.weights.update import AdapterUpdate, NamedTensors, SharedBucket, SharedBuckets, WeightUpdate

__all__ = ["HostMemory", "IpcTransport", "opened"]

DEFAULT_BUCKET_BYTES = 256 * 2**20
ALIGNMENT = 256
"""Alignment of tensors in bytes; the first bytes of a bucket are its stamp."""
CPU = "cpu"


class BucketOffset(NamedTuple):
    """Location of a tensor.

    Attributes:
        name: The tensor's name.
        bucket: Index of its bucket.
        start: First byte in the bucket.
    """

    name: str
    bucket: int
    start: int


class CudaMemory:
    """Memory on the current GPU."""

    def __init__(self) -> None:
        """Select the current GPU.

        Raises:
            SettingsError: torch sees no GPU.
        """
        if not torch.cuda.is_available():
            raise SettingsError(
                "weights.transport over a GPU's shared memory needs a GPU that learner and engine share; torch finds "
                'no GPU. Set weights.transport = "file".'
            )
        self.device = torch.device("cuda", torch.cuda.current_device())

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate [size_bytes] uint8."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def share(self, bucket: torch.Tensor) -> SharedBucket:
        """Return a handle that opens a full bucket, allocated here, in another process.

        torch would keep the memory until the receiver closes it, which a dead receiver never does. Here only the sender
        decides when to free it.
        """
        storage: Any = bucket.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
        storage._release_ipc_counter(counter, counter_offset, device=self.device)
        return SharedBucket(
            handle=handle.hex(),
            size_bytes=size,
            offset_bytes=offset,
            counter=counter.hex(),
            counter_offset=counter_offset,
            event=event.hex(),
            waits=waits,
        )

    def close(self) -> None:
        """Do nothing: torch reclaims memory without references."""


class HostMemory:
    """Memory on a CPU, in files that processes on this machine map; for tests and machines without a GPU."""

    device = torch.device(CPU)

    def __init__(self) -> None:
        """Create a private folder in shared memory."""
        stack = ExitStack()
        self._folder = stack.enter_context(locked_folder(SHARED_MEMORY, FOLDER_PREFIX, mode=0o700))
        self._files: dict[int, Path] = {}
        self._close = weakref.finalize(self, stack.close)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See `CudaMemory.allocate`."""
        file = self._folder / secrets.token_hex(8)
        bucket = torch.from_file(str(file), shared=True, size=size_bytes, dtype=torch.uint8)
        self._files[bucket.data_ptr()] = file
        weakref.finalize(bucket, file.unlink, missing_ok=True)
        return bucket

    def share(self, bucket: torch.Tensor) -> SharedBucket:
        """See `CudaMemory.share`."""
        return SharedBucket(handle=str(self._files[bucket.data_ptr()]), size_bytes=len(bucket))

    def close(self) -> None:
        """Free all memory. Can be called twice."""
        self._close()


class IpcTransport:
    """Copies tensors into buckets that one engine opens."""

    def __init__(
        self,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        keeps: bool = True,
        memory: CudaMemory | HostMemory | None = None,
    ) -> None:
        """Set the memory; none is allocated yet.

        Args:
            bucket_bytes: Maximum size of a bucket with several tensors; a larger tensor gets its own bucket.
            keeps: Keep an update until the next one, for a restarted engine; otherwise `release` frees it.
            memory: Memory of the buckets; by default the current GPU's.

        Raises:
            SettingsError: There is no GPU.
        """
        self._memory = memory or CudaMemory()
        self._bucket_bytes, self._keeps = bucket_bytes, keeps
        self._buckets: list[torch.Tensor] = []
        self._is_closed = False

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """See `WeightTransport.pack`.

        Raises:
            TransferError: A tensor is on another device than the buckets.
        """
        if self._is_closed:
            raise NotReadyError("the weight transport is closed. Create a new one.")
        self._require_here(tensors)
        self._free()
        digests = digest_tensors(tensors, kind=None if adapter is None else "crc32c")
        sizes, offsets = bucket_plan(digests, self._bucket_bytes)
        stamp = secrets.randbits(62)
        self._buckets = [self._memory.allocate(size) for size in sizes]
        for memory in self._buckets:
            _stamp_of(memory).copy_(torch.tensor([version, stamp]))
        for name, bucket, start in offsets:
            _view(self._buckets[bucket], start, digests[name]).copy_(tensors[name].detach())
        shared = SharedBuckets(
            device=_identity(self._memory.device),
            stamp=stamp,
            bucket_bytes=self._bucket_bytes,
            buckets=tuple(map(self._memory.share, self._buckets)),
        )
        return WeightUpdate(version=version, digests=digests, location=shared, tied=dict(tied), adapter=adapter)

    def release(self) -> None:
        """Free the last update, which the engine has loaded, unless it is kept for a restarted one."""
        if not self._keeps:
            self._free()

    def close(self) -> None:
        """See `WeightTransport.close`."""
        self._is_closed = True
        self._free()
        self._memory.close()

    def _free(self) -> None:
        for bucket in self._buckets:
            _stamp_of(bucket).zero_()  # a late reader must not accept the next contents of this memory
        self._buckets = []
        if self._memory.device.type != CPU:
            torch.accelerator.empty_cache()  # otherwise torch would cache memory that the engine needs

    def _require_here(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.device != self._memory.device:
                raise TransferError(
                    f"an engine opens weights on {self._memory.device}; found {name!r} on {tensor.device}. Use a "
                    'learner with one rank in the trainer\'s process, on that GPU, or set weights.transport = "file".'
                )


@contextmanager
def opened(update: WeightUpdate) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of an update in shared buckets, as views of the sender's memory, valid within the context.

    Raises:
        EngineError: The memory is on a GPU that this process does not have, or contents and digests differ.
        WeightsGoneError: The sender has ended, or now has another version.
    """
    shared = update.location
    if not isinstance(shared, SharedBuckets):
        raise EngineError(f"weight update {update.version} is not in shared memory.")
    device = _device_of(shared, update.version)
    sizes, offsets = bucket_plan(update.digests, shared.bucket_bytes)
    found = [bucket.size_bytes for bucket in shared.buckets]
    if found != sizes:
        raise EngineError(f"weight update {update.version} needs buckets of {sizes} bytes; found {found}.")
    try:
        buckets = [_open(bucket, device) for bucket in shared.buckets]
    except (RuntimeError, OSError, ValueError) as error:
        raise _gone(update.version, str(error)) from error
    for number, stamp in enumerate(to_host([_stamp_of(bucket) for bucket in buckets])):
        if stamp.tolist() != [update.version, shared.stamp]:
            raise _gone(update.version, f"bucket {number} has another stamp")
    yield {name: _view(buckets[bucket], start, update.digests[name]) for name, bucket, start in offsets}


def bucket_plan(digests: Mapping[str, TensorDigest], bucket_bytes: int) -> tuple[list[int], list[BucketOffset]]:
    """Lay out tensors in buckets: in order, each bucket as full as possible.

    Returns:
        Size of each bucket in bytes, and the location of each tensor.
    """
    sizes: list[int] = []
    offsets = []
    for name, digest in digests.items():
        size = -(-digest.size_bytes // ALIGNMENT) * ALIGNMENT
        if not sizes or sizes[-1] + size > bucket_bytes:
            sizes.append(ALIGNMENT)
        offsets.append(BucketOffset(name, len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    return sizes, offsets


def _open(bucket: SharedBucket, device: torch.device) -> torch.Tensor:
    """Open [size_bytes] uint8 memory of another process."""
    if device.type == CPU:
        require_plain(Path(bucket.handle), error=WeightsGoneError)
        if Path(bucket.handle).stat().st_size != bucket.size_bytes:
            raise ValueError(f"{bucket.handle} must have {bucket.size_bytes} bytes")
        return torch.from_file(bucket.handle, shared=True, size=bucket.size_bytes, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        bytes.fromhex(bucket.handle),
        bucket.size_bytes,
        bucket.offset_bytes,
        bytes.fromhex(bucket.counter),
        bucket.counter_offset,
        bytes.fromhex(bucket.event),
        bucket.waits,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device_of(shared: SharedBuckets, version: int) -> torch.device:
    if shared.device == CPU:
        return torch.device(CPU)
    here = [_identity(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if shared.device not in here:
        raise EngineError(
            f"weights of version {version} are in memory of {shared.device}; this process sees {here or 'no GPU'}. "
            'Place the engine on the GPU of the learner, or set weights.transport = "file" or "nccl".'
        )
    return torch.device("cuda", here.index(shared.device))


def _identity(device: torch.device) -> str:
    """Return a name of a device that is the same in every process, whichever devices it sees."""
    return CPU if device.type == CPU else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _view(bucket: torch.Tensor, start: int, digest: TensorDigest) -> torch.Tensor:
    flat = bucket[start : start + digest.size_bytes]
    return flat.view(getattr(torch, digest.dtype)).reshape(digest.shape)


def _stamp_of(bucket: torch.Tensor) -> torch.Tensor:
    """Return [2] int64: version and stamp."""
    return bucket[:16].view(torch.int64)


def _gone(version: int, why: str) -> WeightsGoneError:
    return WeightsGoneError(
        f"weight update {version} cannot be opened in the sender's memory: {why}. The sender has ended or has freed "
        "it; publish again."
    )
