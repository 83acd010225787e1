"""What travels when weights are published, and the proof that they arrived.

A `WeightUpdate` carries every tensor under its Hugging Face name with a `TensorDigest`: a checksum of the
bytes (crc32c, or `word_sums` where the tensor is on a GPU), and a *probe*, the tensor applied to a fixed
vector. An engine that fuses, shards or repacks its weights cannot be compared byte by byte, but its live
layers must map the probe vector to the same numbers. A canary (known sequences with the learner's logprobs)
closes the loop through the whole model.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from rl_core.data.records import ExpertArray, FloatArray, IntArray
from rl_core.errors import ShapeError
from rl_core.record_fields import record
from rl_core.weights.digests import TensorDigest

if TYPE_CHECKING:
    import torch

FINGERPRINT_BYTES = 16
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
class SharedBucket:
    """Memory of a process that another one opens; all but the first two fields are of CUDA alone.

    Attributes:
        handle: CUDA's IPC handle of the allocation, in hexadecimal digits; of a CPU's memory the file that is mapped.
        size_bytes: Of the bucket.
        offset_bytes: Where it begins in the allocation.
        counter: File in which torch counts who has the allocation open, in hexadecimal digits.
        counter_offset: Place in that file.
        event: CUDA's IPC handle of the event after which the bucket is full, in hexadecimal digits.
        waits: Whether to wait for that event.
    """

    handle: str
    size_bytes: int
    offset_bytes: int = 0
    counter: str = ""
    counter_offset: int = 0
    event: str = ""
    waits: bool = False


@record
class SharedBuckets:
    """Where the tensors of an update lie side by side; plain values alone, so that nothing runs when they are read.

    Which bucket a tensor is in, and where, follows from the digests and from bucket_bytes: see `bucket_plan`.

    Attributes:
        device: UUID of the GPU, or "cpu".
        stamp: With the version at the start of every bucket, as long as it holds this update.
        bucket_bytes: Most bytes of a bucket that holds several tensors.
        buckets: In order.
    """

    device: str
    stamp: int
    bucket_bytes: int
    buckets: tuple[SharedBucket, ...]


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
    """All weights of one policy version, or its adapter: by value, as a file, in shared memory, or to be received.

    Attributes:
        version: The policy version that these weights are.
        digests: Digest of each tensor, by Hugging Face name (of an adapter by peft's), made by the sender.
        tensors: The tensors when sender and engine share a process.
        file: A safetensors file, in shared memory, when they do not.
        broadcast: Where the tensors are received, in the order of the digests, when they come over the network.
        sources: Where rectangles of them are received, when each rank of the learner sends its own.
        shared: Where the tensors are opened, in memory of the sender's GPU.
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
    shared: SharedBuckets | None = None
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
        """One digest of what the weights are, whatever their version; the same for the same kind of checksum."""
        content = [[name, d.shape, d.dtype, d.checksum] for name, d in sorted(self.served.items())]
        text = json.dumps([content, sorted(self.tied.items())])
        return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()


@record
class WeightReceipt:
    """What an engine says after an update.

    Attributes:
        version: The version that it now serves.
        arrived: Checksum of each tensor as it arrived, by Hugging Face name, of the kind of its digest.
        live: Probe of each tensor as the engine now serves it, tied names included; NaN where it read the tensor back
            and found other bits than arrived, or where the expert that has it computes something else.
        problems: What the engine itself found wrong, such as an adapter in another slot; the proof fails with them.
    """

    version: int
    arrived: Mapping[str, str]
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
