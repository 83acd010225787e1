"""What an engine's workers and a sender of weights say to each other, as JSON on connections that proved the secret."""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.json import Decoder

MAX_WORKERS = 4096
WorkerCount = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class WorkerHello(Struct):
    """A worker's first message.

    Attributes:
        group: Name of the group of its engine's workers.
        rank: Its rank in the group, from 1.
        num_workers: Number of the engine's workers.
    """

    group: str
    rank: WorkerCount
    num_workers: WorkerCount


class VersionRequest(Struct):
    """A worker's request of all weights of a policy version; the sender waits for those of the whole group."""

    version: int


class Answer(Struct):
    """The sender's answer, the same to every worker of a group; None if it will send the version."""

    refusal: str | None


class NcclId(Struct):
    """NCCL's unique id, under the key by which torch asks for it."""

    key: str
    value: bytes


decode_hello = Decoder(WorkerHello).decode
decode_request = Decoder(VersionRequest).decode
decode_answer = Decoder(Answer).decode
decode_nccl_id = Decoder(NcclId).decode
