"""What clients and the server of a queue say to each other; checked against these types as it is decoded."""

import struct
from typing import Any

import msgspec

GENERATE = "generate"
"""Task name of claims."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


class PartInfo(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one prompt that lie together in a segment.

    Attributes:
        prompt_uid: Which prompt.
        first: Index of its first row in the segment.
        num_rows: How many.
        num_tokens: Tokens of these rows.
        size_bytes: Bytes of their columns.
        oldest: Oldest policy version of their sampled tokens, -1 without any.
        newest: Newest one.
    """

    prompt_uid: str
    first: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    oldest: int = -1
    newest: int = -1


def part_numbers(part: PartInfo) -> tuple[int, int, int, int, int, int]:
    """What a part says after its prompt."""
    return part.first, part.num_rows, part.num_tokens, part.size_bytes, part.oldest, part.newest


class Issue(Message):
    """Prompts as (uid, encoded prompt)."""

    prompts: list[tuple[str, Any]]
    num_sessions: int
    is_retry: bool = False


class Reserve(Message):
    """Capacity for rows, before they are written; answered by `Reserved`."""

    sessions: list[tuple[str, list[int]]]
    num_rows: int
    size_bytes: int
    segment_bytes: int
    put_id: str
    deadline_s: float


class Put(Message):
    """Rows that are written; `place` is where, in the backend's terms, `sessions` those that it settles.

    `reservation` is that of `Reserve`, 0 where capacity is waited for now.
    """

    sessions: list[tuple[str, list[int]]]
    parts: list[PartInfo]
    columns: list[str]
    place: Any
    put_id: str
    reservation: int
    deadline_s: float


class Fail(Message):
    """A session that failed."""

    prompt_uid: str
    session_index: int
    reason: str
    is_retry: bool = False


class Drop(Message):
    """A prompt to take out."""

    prompt_uid: str
    reason: str
    reissue: bool
    is_retry: bool = False


class LeaseRequest(Message):
    """So many groups for a task, or those of the prompts that are named."""

    task: str
    groups: int
    lease_s: float
    deadline_s: float
    allow_fewer: bool
    prompts: list[str] = msgspec.field(default_factory=list)


class Extend(Message):
    """More time for a lease."""

    lease_id: int
    task: str
    lease_s: float


class Ack(Message):
    """A lease is done; the columns given are in a segment whose rows are the lease's.

    `place` and `reservation` are those of `Put`.
    """

    lease_id: int
    task: str
    columns: list[str]
    size_bytes: int
    place: Any
    reservation: int = 0
    is_retry: bool = False


class Finish(Message):
    """Prompts that a task is done with and holds no longer; `number` is the request's own, below 0: no lease has it."""

    task: str
    prompts: list[str]
    number: int
    is_retry: bool = False


class Release(Message):
    """Release a lease."""

    lease_id: int


class Lost(Message):
    """A segment cannot be read."""

    segment_id: int
    reason: str


class Unpin(Message):
    """Segments that the client no longer looks at."""

    segment_ids: list[int]


class SetPolicyVersion(Message):
    """The published version."""

    version: int


class Ask(Message):
    """For "stats", "ledger", "unsettled", "recovery", "forget_finished"."""

    what: str


Request = (
    Issue
    | Reserve
    | Put
    | Fail
    | Drop
    | LeaseRequest
    | Extend
    | Ack
    | Finish
    | Release
    | Lost
    | Unpin
    | SetPolicyVersion
    | Ask
)


class LeasedGroup(msgspec.Struct, array_like=True, frozen=True):
    """One group of a lease.

    Attributes:
        prompt: Encoded prompt.
        sessions: Missing sessions, for a claim.
        parts: Segment, first row and number of rows, of the rows as they were put.
        late: The same of columns that tasks gave, with their names; later ones hold.
    """

    prompt: Any
    sessions: list[int]
    parts: list[tuple[int, int, int]]
    late: list[tuple[int, int, int, list[str]]]


class Leased(Message):
    """Groups, and where the segments are that hold them; `columns` are those that the task may see."""

    lease_id: int
    expires_at: float
    groups: list[LeasedGroup]
    columns: list[str]
    places: dict[int, Any]


class Reserved(Message):
    """Where to write."""

    reservation: int
    place: Any


class Done(Message):
    """It is done; `value` is the answer of an `Ask`, or the new end of a lease."""

    value: Any = None


class Refused(Message):
    """It is not; `kind` is the error's class in `rl_core.errors`."""

    kind: str
    text: str


Reply = Leased | Reserved | Done | Refused


class Hello(Message):
    """The first words of a connection: who speaks, the same for all connections of a process."""

    client: str


def as_retry(request: Request) -> Request:
    """The same request, said a second time because its first answer may be lost."""
    if isinstance(request, Issue | Fail | Drop | Ack | Finish):
        return msgspec.structs.replace(request, is_retry=True)
    return request


MAX_FRAME_BYTES = 1 << 30
FRAME = struct.Struct("<I")


def encode_frame(message: Any) -> bytes:
    """A message with its length before it."""
    body = _ENCODER.encode(message)
    return FRAME.pack(len(body)) + body


_ENCODER = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request | Hello).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
