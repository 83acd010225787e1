"""Weight updates, and the proof that they arrived.

A `WeightUpdate` carries every tensor under its Hugging Face name with a `TensorDigest`: a checksum of the bytes
(crc32c, or `word_sums` for tensors on a GPU), and a *probe*, the product of the tensor and a fixed vector. An engine
that fuses, shards or repacks its weights cannot be compared byte by byte, but its live layers must map the probe vector
to the same numbers. A canary (known sequences with the learner's logprobs) proves the whole model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol

import numpy as np

from rl_core.data.records import ExpertArray, FloatArray, ImageSpan, IntArray
from rl_core.errors import ShapeError
from rl_core.record_fields import Axes, record
from rl_core.weights.digests import ChecksumKind, TensorDigest

if TYPE_CHECKING:
    import torch

FINGERPRINT_BYTES = 16
POLICY_ADAPTER = "policy"
"""Name of an adapter that is published without one."""
NamedTensors = Mapping[str, "torch.Tensor"]
"""Tensors by Hugging Face name."""


@record
class Broadcast:
    """Address and options of the sender of an update; only plain values, so that it can be sent as JSON.

    Attributes:
        backend: "nccl" between GPUs, "tcp" between CPUs.
        host: The sender's address that receivers can reach.
        port: The sender's port.
        secret: Hexadecimal digits; a process that knows it receives the weights.
        bucket_bytes: Maximum number of bytes in flight.
        deadline_s: Maximum wait in seconds of one side for the other, per step.
    """

    backend: Literal["tcp", "nccl"]
    host: str
    port: int
    secret: str = field(repr=False)
    bucket_bytes: int
    deadline_s: float


class Rectangle(NamedTuple):
    """A part of a tensor.

    Attributes:
        name: The tensor's name.
        offsets: First index per axis.
        sizes: Size per axis.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@record
class WeightSource:
    """A sender of an update.

    Attributes:
        sender: Name for error messages, such as "learner[1]".
        meeting: Address and options of the sender.
        rectangles: The rectangles that it sends, in the order of the update's tensors.
    """

    sender: str
    meeting: Broadcast
    rectangles: Sequence[Rectangle]


@record
class SharedBucket:
    """Memory that another process opens; fields after the first two are used only with CUDA.

    Attributes:
        handle: CUDA's IPC handle of the allocation, in hexadecimal digits; on a CPU, the path of the mapped file.
        size_bytes: Size of the bucket.
        offset_bytes: First byte of the bucket in the allocation.
        counter: File in which torch counts the processes that have the allocation open, in hexadecimal digits.
        counter_offset: Position in that file.
        event: CUDA's IPC handle of the event after which the bucket is full, in hexadecimal digits.
        waits: Whether the receiver must wait for that event.
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
    """Location of an update in memory of the sender's GPU, side by side; only plain values: reading it runs no code.

    The digests and bucket_bytes determine each tensor's bucket and position: see `bucket_plan`.

    Attributes:
        device: UUID of the GPU, or "cpu".
        stamp: Written with the version at the start of every bucket while it holds this update.
        bucket_bytes: Maximum size of a bucket with several tensors.
        buckets: The buckets, in order.
    """

    device: str
    stamp: int
    bucket_bytes: int
    buckets: tuple[SharedBucket, ...]


@record
class InProcess:
    """Location of an update in the memory of this process.

    Attributes:
        tensors: The tensors by Hugging Face name (an adapter's by peft's name).
    """

    tensors: NamedTensors


@record
class InFile:
    """Location of an update in shared memory, or on a disk, of this machine.

    Attributes:
        file: A safetensors file.
    """

    file: Path


@record
class FromSenders:
    """Location of an update at its senders, which send it over the network.

    Attributes:
        sources: Senders of the tensors' rectangles; a single one sends every tensor whole.
    """

    sources: Sequence[WeightSource]


Location = InProcess | InFile | SharedBuckets | FromSenders
"""Where the tensors of an update are; the class says how an engine takes them."""


@record
class AdapterUpdate:
    """Marks an update as a LoRA adapter: its tensors are the A and B, and the base's weights stay.

    A is [rank, in]; B is [out, rank], already multiplied by the adapter's scaling, so that W + B @ A is served. Names
    are peft's, such as "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".

    Attributes:
        rank: Rank of every A and B.
        base: Digest of each base tensor that the engine must still serve, by Hugging Face name.
        name: Name by which requests choose it. It replaces the adapter of this name; others stay.
    """

    rank: int
    base: Mapping[str, TensorDigest]
    name: str = POLICY_ADAPTER


@record
class WeightUpdate:
    """All weights of a policy version, or its adapter, and where an engine finds them.

    Attributes:
        version: Policy version of the weights.
        digests: Digest of each tensor, by Hugging Face name (for an adapter by peft's name), computed by the sender.
        location: Where the tensors are.
        tied: Names that the engine must serve from another tensor, such as
            {"lm_head.weight": "model.embed_tokens.weight"}.
        adapter: The adapter; None if the tensors are all weights.
    """

    version: int
    digests: Mapping[str, TensorDigest]
    location: Location
    tied: Mapping[str, str] = field(default_factory=dict)
    adapter: AdapterUpdate | None = None

    @property
    def is_sent(self) -> bool:
        """True if the tensors come over the network."""
        return isinstance(self.location, FromSenders)

    @property
    def sources(self) -> Sequence[WeightSource]:
        """Senders of the tensors; empty if they do not come over the network."""
        return self.location.sources if isinstance(self.location, FromSenders) else ()

    @property
    def kinds(self) -> dict[str, ChecksumKind]:
        """Kind of each tensor's checksum, which the receiver must compute."""
        return {name: digest.kind for name, digest in self.digests.items()}

    @property
    def served(self) -> dict[str, TensorDigest]:
        """Digest of each tensor that an engine must serve after the update, including an adapter's base."""
        return {**(self.adapter.base if self.adapter is not None else {}), **self.digests}

    @property
    def size_bytes(self) -> int:
        """Number of bytes sent to each engine."""
        return sum(digest.size_bytes for digest in self.digests.values())

    @property
    def fingerprint(self) -> str:
        """Digest of all weights, independent of the version; comparable only between checksums of one kind."""
        content = [[name, d.shape, d.dtype, d.checksum] for name, d in sorted(self.served.items())]
        text = json.dumps([content, sorted(self.tied.items())])
        return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()


@record
class WeightReceipt:
    """An engine's report after an update.

    Attributes:
        version: Policy version that it now serves.
        arrived: Checksum of each tensor as it arrived, by Hugging Face name, of the same kind as in its digest.
        live: Probe of each tensor as the engine now serves it, including tied names; NaN if the tensor read back
            differs in bits, or if its expert computes something else.
        problems: Problems that the engine found, such as an adapter in the wrong slot; they fail the proof.
        unnamed: Tensors that no live layer has as they are. At its start, an update with other values reached its
            live layers, and the folder's own brought them back bit for bit. The canary proves their values.
    """

    version: int
    arrived: Mapping[str, str]
    live: Mapping[str, FloatArray]
    problems: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


@record
class Canary:
    """Sequences whose logprobs prove the whole model.

    Attributes:
        sequences: Token ids, each [T] int32 with T >= 2.
        logprobs: The learner's logprobs of the tokens, each [T], with 0 at position 0. None for a mixture-of-experts
            model with router replay, for which the learner needs the engine's experts: see `prove_canary`.
        images: Images of each sequence; empty if none has any.
    """

    sequences: Sequence[IntArray]
    logprobs: Sequence[FloatArray] | None
    images: Sequence[tuple[ImageSpan, ...]] = ()

    def __post_init__(self) -> None:
        """Check that there is at least one sequence, and that the two lists are aligned."""
        rows = self.sequences if self.logprobs is None else self.logprobs
        if not self.sequences or len(self.sequences) != len(rows):
            raise ShapeError(
                f"a canary needs at least one sequence, and logprobs for each; found {len(self.sequences)} sequences "
                f"and {len(rows)} rows of logprobs."
            )
        if self.images and len(self.images) != len(self.sequences):
            raise ShapeError(
                f"a canary needs the images of each sequence, or none; found {len(self.images)} for "
                f"{len(self.sequences)} sequences."
            )
        for index, (sequence, logprobs) in enumerate(zip(self.sequences, rows, strict=True)):
            if sequence.ndim != 1 or len(sequence) < 2 or logprobs.shape != sequence.shape:
                raise ShapeError(
                    f"canary sequence {index} and its logprobs must both be [T] with T >= 2; found "
                    f"{list(sequence.shape)} and {list(logprobs.shape)}."
                )


@record
class TokenScores:
    """An engine's logprobs of each token of a sequence, and of the most likely tokens at its position.

    Row t scores token t, given the tokens before it. Its first entry is the token itself. The K most likely tokens
    follow, most likely first; they may include the token itself. Token 0 has no context: its ids are -1, its logprobs
    0.

    Attributes:
        token_ids: [T, K + 1] int32.
        logprobs: [T, K + 1] float32 of token_ids, at temperature 1.
        routed_experts: [T, layers, top_k] int16 experts of the same pass; None unless requested, and for engines and
            models that report none.
    """

    token_ids: Annotated[IntArray, Axes("T", "K + 1")]
    logprobs: Annotated[FloatArray, Axes("T", "K + 1")]
    routed_experts: Annotated[ExpertArray | None, Axes("T", "layers", "top_k")] = None

    @property
    def token_logprobs(self) -> FloatArray:
        """[T] logprobs of the sequence's own tokens; position 0 is 0."""
        return self.logprobs[:, 0]

    @classmethod
    def after_first(cls, token_ids: IntArray, logprobs: FloatArray) -> "TokenScores":
        """Build the scores of a sequence from those of its tokens after the first.

        Args:
            token_ids: [T - 1, K + 1] integers.
            logprobs: [T - 1, K + 1] floats.
        """
        above = ((1, 0), (0, 0))
        return cls(
            token_ids=np.pad(token_ids.astype(np.int32, copy=False), above, constant_values=-1),
            logprobs=np.pad(logprobs.astype(np.float32, copy=False), above),
        )


class WeightReceiver(Protocol):
    """The part of an engine that publishing needs."""

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace all weights; running requests must not see a mixture of old and new."""
        ...

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        with_experts: bool = False,
        images: Sequence[tuple[ImageSpan, ...]] = (),
        adapter: str | None = None,
    ) -> list[TokenScores]:
        """Return the logprobs of each sequence's tokens, with their experts for a canary without logprobs.

        `adapter` names the adapter to prove; None is that of the policy.
        """
        ...


class WeightTransport(Protocol):
    """Moves tensors from the learner to engines."""

    def pack(
        self, tensors: NamedTensors, *, version: int, tied: Mapping[str, str], adapter: AdapterUpdate | None = None
    ) -> WeightUpdate:
        """Prepare tensors for engines; valid until the next `pack` or `close`."""
        ...

    def close(self) -> None:
        """Free the last update."""
        ...
