"""Proof of a tensor: a checksum of its bytes, and its product with a fixed vector."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import numpy as np

from rl_core.data.records import FloatArray
from rl_core.files.durable import checksum
from rl_core.record_fields import record
from rl_core.weights.word_sums import word_sums

if TYPE_CHECKING:
    import torch

MAX_DIGEST_THREADS = 4
"""Maximum parallel checksums; beyond it, memory bandwidth is the limit."""
PROBED_AT_ONCE = 2**24
"""Number of elements converted to float32 at a time."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PEFT_PREFIX = "base_model.model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
"""Names that peft gives an adapter's tensors: prefix, the base module, and one of these."""

Answer = TypeVar("Answer")

ChecksumKind = Literal["crc32c", "sums"]
"""Kind of checksum: crc32c on the host, or `word_sums` on the tensor's device."""


@record
class TensorDigest:
    """Expected properties of a tensor on arrival.

    Attributes:
        shape: Its shape.
        dtype: torch dtype name without prefix, such as "float32".
        checksum: Checksum of its contiguous bytes with its kind: "crc32c:e3069283", or "sums:" and 32 digits.
        probe: [out] float32 result of `probe_tensor`.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: str
    probe: FloatArray = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Size of its contiguous values in bytes."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def kind(self) -> ChecksumKind:
        """Kind of the checksum, which the receiver must compute."""
        return cast("ChecksumKind", self.checksum.partition(":")[0])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the probe as plain bytes, because an adapter's update has the digests of its whole base."""
        return _unpickled_digest, (self.shape, self.dtype, self.checksum, self.probe.tobytes())


def _unpickled_digest(shape: tuple[int, ...], dtype: str, checksum: str, probe: bytes) -> TensorDigest:
    return TensorDigest(shape=shape, dtype=dtype, checksum=checksum, probe=np.frombuffer(probe, np.float32).copy())


def probe_vector(size: int) -> "torch.Tensor":
    """Return [size] float32 fixed values in [-1, 1], the same on every machine."""
    import torch

    positions = torch.arange(1, size + 1, dtype=torch.float64)
    return torch.sin(positions * 12.9898).to(torch.float32)


def probe_tensor(tensor: "torch.Tensor", name: str = "") -> FloatArray:
    """Multiply a tensor by the probe vector, in float32.

    Args:
        tensor: [out, in] or [experts, out, in] weights, or [n] such as a norm's scale.
        name: Name of the tensor. An adapter's B, [out, rank], is probed from its other side, to send fewer numbers.

    Returns:
        [out], [experts * out], or the [n] values themselves; [rank] for an adapter's A and B.
    """
    found: FloatArray = _probed(tensor, name).cpu().numpy().copy()
    return found


def tensor_crc32c(tensor: "torch.Tensor") -> int:
    """Return the crc32c of a tensor's contiguous bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return checksum(flat.numpy())


def tensor_checksum(tensor: "torch.Tensor", kind: ChecksumKind | None = None) -> str:
    """Return the checksum of a tensor's contiguous bytes, in the format of `TensorDigest`.

    Args:
        tensor: Tensor of any shape and strides.
        kind: Kind of checksum; None uses "sums" for a tensor on a GPU, and "crc32c" otherwise.
    """
    return sums_text(word_sums(tensor).tolist()) if (kind or _own_kind(tensor)) == "sums" else _crc32c_text(tensor)


def _crc32c_text(tensor: "torch.Tensor") -> str:
    return f"crc32c:{tensor_crc32c(tensor):08x}"


def digest_tensors(
    tensors: Mapping[str, "torch.Tensor"], *, kind: ChecksumKind | None = None
) -> dict[str, TensorDigest]:
    """Return the sender's digest of each tensor.

    Args:
        tensors: Tensors by name; see `probe_tensor`.
        kind: Kind of the checksums; None uses "sums" for tensors on a GPU, and "crc32c" otherwise.
    """
    own = {name: kind or _own_kind(tensor) for name, tensor in tensors.items()}
    sums, probes = _sums_and_probes(tensors, kinds=own)
    return {
        name: TensorDigest(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            checksum=sums[name],
            probe=probes[name],
        )
        for name, tensor in tensors.items()
    }


def _sums_and_probes(
    tensors: Mapping[str, "torch.Tensor"], *, kinds: Mapping[str, ChecksumKind]
) -> tuple[dict[str, str], dict[str, FloatArray]]:
    """Return checksums and probes of tensors; results of one device are copied to the host together."""
    kept = [name for name in tensors if kinds[name] == "sums"]
    read = [name for name in tensors if kinds[name] != "sums"]
    crcs = _on_threads(_crc32c_text, [tensors[name] for name in read])
    sums = [word_sums(tensors[name]) for name in kept]
    on_host = to_host([*sums, *_on_threads(_probed, list(tensors.values()), tensors)])
    texts = dict(zip(read, crcs, strict=True)) | dict(zip(kept, _texts(on_host), strict=False))
    return texts, {name: probe.numpy() for name, probe in zip(tensors, on_host[len(kept) :], strict=True)}


def sums_text(sums: Sequence[int]) -> str:
    """Format the two sums of `word_sums`, modulo 2**64, for digests and receipts."""
    return f"sums:{sums[0] % 2**64:016x}{sums[1] % 2**64:016x}"


def _texts(sums: Iterable["torch.Tensor"]) -> Iterator[str]:
    return (sums_text(one.tolist()) for one in sums)


class PassingChecksums:
    """Checksums of a stream of tensors: crc32c in a thread; sums on the tensor's device until the end."""

    def __init__(self, kinds: Mapping[str, ChecksumKind]) -> None:
        """Set the kind of checksum per tensor; the default is crc32c."""
        self._kinds = kinds
        self._thread = ThreadPoolExecutor(1, "checksums of weights")
        self._read: dict[str, Future[str]] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "PassingChecksums":
        """Start."""
        return self

    def __exit__(self, *_: object) -> None:
        """Discard pending checksums."""
        self._thread.shutdown(cancel_futures=True)

    def passing(self, tensors: Iterable[tuple[str, "torch.Tensor"]]) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield the same tensors and add each to the checksums."""
        last: Future[str] | None = None
        for name, tensor in tensors:
            if last is not None:
                last.result()  # at most one tensor is kept for its checksum
            if self._kinds.get(name) == "sums":
                self._sums[name] = word_sums(tensor)
            else:
                last = self._read[name] = self._thread.submit(_crc32c_text, tensor)
            yield name, tensor

    def result(self) -> dict[str, str]:
        """Return the checksum of each tensor that passed."""
        return self.with_probes({})[0]

    def with_probes(self, live: Mapping[str, "torch.Tensor"]) -> tuple[dict[str, str], dict[str, FloatArray]]:
        """Return the checksum of each tensor that passed, and probes of others; a GPU's results are copied together."""
        numbers = to_host([*self._sums.values(), *(_probed(tensor) for tensor in live.values())])
        sums = dict(zip(self._sums, _texts(numbers), strict=False))
        read = {name: checksum.result() for name, checksum in self._read.items()}
        probes = (probe.numpy() for probe in numbers[len(sums) :])
        return read | sums, dict(zip(live, probes, strict=True))


def to_host(tensors: Sequence["torch.Tensor"]) -> list["torch.Tensor"]:
    """Copy tensors to host memory; those of one device are copied together."""
    import torch

    found: dict[int, torch.Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.cat([tensors[index].contiguous().reshape(-1).view(torch.uint8) for index in here]).cpu()
        for index, part in zip(here, torch.split(joined, [tensors[index].nbytes for index in here]), strict=True):
            found[index] = part.clone().view(tensors[index].dtype).reshape(tensors[index].shape)
    return [found[index] for index in range(len(tensors))]


def _own_kind(tensor: "torch.Tensor") -> ChecksumKind:
    return "crc32c" if tensor.device.type == "cpu" else "sums"


def _probed(tensor: "torch.Tensor", name: str = "") -> "torch.Tensor":
    """See `probe_tensor`; computed on the tensor's device."""
    import torch

    values = tensor.detach()
    if name.endswith(LORA_B):
        values = values.T
    if values.ndim < 2:
        return values.float()
    vector = probe_vector_on(values.shape[-1], values.device)
    rows = values.flatten(0, -2)
    parts = torch.split(rows, max(1, PROBED_AT_ONCE // max(1, values.shape[-1])))
    return torch.cat([part.float() @ vector for part in parts])


@lru_cache(maxsize=64)
def probe_vector_on(size: int, device: "torch.device") -> "torch.Tensor":
    """Return `probe_vector` on a device, cached."""
    return probe_vector(size).to(device)


def _on_threads(
    compute: Callable[..., Answer], tensors: Sequence["torch.Tensor"], *others: Iterable[object]
) -> list[Answer]:
    """Run several computations in parallel; on a GPU sequentially, in the caller's stream."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return list(map(compute, tensors, *others))
    with ThreadPoolExecutor(min(MAX_DIGEST_THREADS, os.cpu_count() or 1), "digest") as threads:
        return list(threads.map(compute, tensors, *others))
