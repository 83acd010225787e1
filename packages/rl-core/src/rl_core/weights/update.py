"""What travels when weights are published, and the proof that they arrived.

A `WeightUpdate` carries every tensor under its Hugging Face name with a `TensorDigest`: a checksum of
the bytes, and a *probe*, the tensor applied to a fixed vector. An engine that fuses, shards or repacks
its weights cannot be compared byte by byte, but its live layers must map the probe vector to the same
numbers. A canary (known sequences with the learner's logprobs) closes the loop through the whole model.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from rl_core.data.records import ExpertArray, FloatArray, IntArray
from rl_core.errors import ShapeError
from rl_core.files.checksums import checksum
from rl_core.record_fields import record

if TYPE_CHECKING:
    import torch

FINGERPRINT_BYTES = 16
MAX_DIGEST_THREADS = 4
"""Memory is the limit beyond."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PEFT_PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""How peft names an adapter's tensors: prefix, the base's module, and one of these."""


@record
class TensorDigest:
    """What a tensor must be on arrival.

    Attributes:
        shape: Its shape.
        dtype: torch dtype name without prefix, such as "float32".
        crc32c: Checksum of its contiguous bytes.
        probe: [out] float32 of `probe_tensor`.
    """

    shape: tuple[int, ...]
    dtype: str
    crc32c: int
    probe: FloatArray = field(repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """The probe travels as plain bytes: an adapter's update has the digests of its whole base."""
        return _unpickled_digest, (self.shape, self.dtype, self.crc32c, self.probe.tobytes())


def _unpickled_digest(shape: tuple[int, ...], dtype: str, crc32c: int, probe: bytes) -> TensorDigest:
    return TensorDigest(shape=shape, dtype=dtype, crc32c=crc32c, probe=np.frombuffer(probe, np.float32).copy())


@record
class Broadcast:
    """Where the tensors of an update can be received; plain values alone, so that it can travel as JSON.

    Attributes:
        backend: "nccl" between GPUs, "tcp" (or "gloo", its earlier name) between CPUs.
        host: Of the sender, as receivers reach it.
        port: Where the sender listens.
        secret: In hexadecimal digits; who knows it is given the weights.
        bucket_bytes: Most bytes that travel at once.
        deadline_s: Longest wait of one side for the other, in every step.
    """

    backend: Literal["tcp", "gloo", "nccl"]
    host: str
    port: int
    secret: str = field(repr=False)
    bucket_bytes: int
    deadline_s: float


class Rectangle(NamedTuple):
    """A part of a tensor.

    Attributes:
        name: Of the tensor.
        offsets: Where it begins, by axis.
        sizes: Its extent, by axis.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@record
class WeightSource:
    """One of several senders of an update.

    Attributes:
        sender: Who it is, for messages, such as "learner[1]".
        meeting: Where it is met.
        rectangles: What it sends, in order; that of the tensors is the update's.
    """

    sender: str
    meeting: Broadcast
    rectangles: Sequence[Rectangle]


@record
class AdapterUpdate:
    """What makes an update one of a LoRA adapter: its tensors are the A and B, and the base's weights stay.

    A is [rank, in]; B is [out, rank], multiplied by the adapter's scaling already, so that W + B @ A is served. Names
    are peft's, such as "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".

    Attributes:
        rank: Of every A and B.
        base: Digest of each tensor of the base, by Hugging Face name: what the engine must still serve under it.
    """

    rank: int
    base: Mapping[str, TensorDigest]


@record
class WeightUpdate:
    """All weights of one policy version, or its adapter: by value, as a file, or to be received.

    Attributes:
        version: The policy version that these weights are.
        digests: Digest of each tensor, by Hugging Face name (of an adapter by peft's), made by the sender.
        tensors: The tensors when sender and engine share a process.
        file: A safetensors file, in shared memory, when they do not.
        broadcast: Where the tensors are received, in the order of the digests, when they come over the network.
        sources: Where rectangles of them are received, when each rank of the learner sends its own.
        tied: Names that the engine must serve from another tensor, such as
            {"lm_head.weight": "model.embed_tokens.weight"}.
        adapter: None where the tensors are all weights.
    """

    version: int
    digests: Mapping[str, TensorDigest]
    tensors: Mapping[str, "torch.Tensor"] | None = None
    file: Path | None = None
    broadcast: Broadcast | None = None
    sources: Sequence[WeightSource] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    adapter: AdapterUpdate | None = None

    @property
    def is_sent(self) -> bool:
        """Whether the tensors come over the network."""
        return self.broadcast is not None or bool(self.sources)

    @property
    def served(self) -> dict[str, TensorDigest]:
        """Digest of each tensor that an engine must serve after the update: an adapter's, and those of its base."""
        return {**(self.adapter.base if self.adapter is not None else {}), **self.digests}

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that are sent to each engine."""
        return sum(DTYPE_BYTES[digest.dtype] * math.prod(digest.shape) for digest in self.digests.values())

    @property
    def fingerprint(self) -> str:
        """One digest of what the weights are, whatever their version and their way; the same weights have the same."""
        content = [[name, d.shape, d.dtype, d.crc32c] for name, d in sorted(self.served.items())]
        text = json.dumps([content, sorted(self.tied.items())])
        return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()


@record
class WeightReceipt:
    """What an engine says after an update.

    Attributes:
        version: The version that it now serves.
        arrived: crc32c of each tensor as it arrived, by Hugging Face name.
        live: Probe of each tensor as the engine now serves it, tied names included; NaN where it read the tensor back
            and found other bits than arrived, or where the expert that has it computes something else.
        problems: What the engine itself found wrong, such as an adapter in another slot; the proof fails with them.
    """

    version: int
    arrived: Mapping[str, int]
    live: Mapping[str, FloatArray]
    problems: tuple[str, ...] = ()


@record
class Canary:
    """Sequences whose logprobs prove the whole model.

    Attributes:
        sequences: Token ids, each [T] int32 with T >= 2.
        logprobs: The learner's logprobs of the tokens, each [T], position 0 is 0; None of a mixture that replays,
            since the learner needs the experts that an engine used: see `prove_canary`.
    """

    sequences: Sequence[IntArray]
    logprobs: Sequence[FloatArray] | None

    def __post_init__(self) -> None:
        """Check that there is something to compare, and that the two lists are aligned."""
        rows = self.sequences if self.logprobs is None else self.logprobs
        if not self.sequences or len(self.sequences) != len(rows):
            raise ShapeError(
                "a canary needs at least one sequence, and logprobs for each; found "
                f"{len(self.sequences)} sequences and {len(rows)} rows of logprobs."
            )
        for index, (sequence, logprobs) in enumerate(zip(self.sequences, rows, strict=True)):
            if sequence.ndim != 1 or len(sequence) < 2 or logprobs.shape != sequence.shape:
                raise ShapeError(
                    f"canary sequence {index} and its logprobs must both be [T] with T >= 2; found "
                    f"{list(sequence.shape)} and {list(logprobs.shape)}."
                )


@record
class RoutedScores:
    """What an engine thinks of a sequence, and the experts of a mixture that it used for it.

    Attributes:
        logprobs: [T] float32 at temperature 1, position 0 is 0.
        routed_experts: [T, layers, top_k] int16; None of engines and models that tell none.
    """

    logprobs: FloatArray
    routed_experts: ExpertArray | None = None


class WeightReceiver(Protocol):
    """The part of an engine that publishing needs."""

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace all weights; requests that run now must not see half of them."""
        ...

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Logprobs of the tokens of each sequence at temperature 1, position 0 is 0."""
        ...

    async def score_with_experts(self, sequences: Sequence[IntArray]) -> list[RoutedScores]:
        """As `score`, with the experts of the same pass; asked only for a canary without logprobs."""
        ...


class WeightTransport(Protocol):
    """How tensors get from the learner to engines."""

    def pack(
        self,
        tensors: Mapping[str, "torch.Tensor"],
        *,
        version: int,
        tied: Mapping[str, str],
        adapter: AdapterUpdate | None = None,
    ) -> WeightUpdate:
        """Make tensors ready to be taken by engines; valid until the next `pack` or `close`."""
        ...

    def close(self) -> None:
        """Free what the last update holds."""
        ...


def probe_vector(size: int) -> "torch.Tensor":
    """[size] float32 of fixed values in [-1, 1], the same on every machine."""
    import torch

    positions = torch.arange(1, size + 1, dtype=torch.float64)
    return torch.sin(positions * 12.9898).to(torch.float32)


def probe_tensor(tensor: "torch.Tensor", name: str = "") -> FloatArray:
    """What a tensor does to the probe vector, in float32.

    Args:
        tensor: [out, in] or [experts, out, in] weights, or [n] such as a norm's scale.
        name: Of an adapter's B, [out, rank], which is probed from its other side: few numbers travel with an adapter.

    Returns:
        [out], [experts * out], or the [n] values themselves; [rank] of an adapter's A and B.
    """
    values = tensor.detach().float()
    if name.endswith(LORA_B):
        values = values.T
    if values.ndim == 1:
        return values.cpu().numpy().copy()
    vector = probe_vector(values.shape[-1]).to(values.device)
    return (values @ vector).reshape(-1).cpu().numpy()


def tensor_crc32c(tensor: "torch.Tensor") -> int:
    """crc32c of a tensor's contiguous bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return checksum(flat.numpy())


def digest_tensor(tensor: "torch.Tensor", name: str = "") -> TensorDigest:
    """Digest of a tensor, as the sender makes it; see `probe_tensor`."""
    return TensorDigest(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        crc32c=tensor_crc32c(tensor),
        probe=probe_tensor(tensor, name),
    )


def digest_tensors(tensors: Mapping[str, "torch.Tensor"]) -> dict[str, TensorDigest]:
    """Digest of each tensor, several at once."""
    with ThreadPoolExecutor(min(MAX_DIGEST_THREADS, os.cpu_count() or 1), "digest") as threads:
        return dict(zip(tensors, threads.map(digest_tensor, tensors.values(), tensors), strict=True))
