"""Messages between clients and the server of a queue, checked by their types, and prompts in them as JSON."""

import struct
from dataclasses import fields
from typing import Any, Literal

import msgspec

from rl_core.data.records import ImageSpan, Prompt
from rl_core.errors import DataError, ShapeError

GENERATE = "generate"
"""Task name of claims."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


class PartInfo(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one prompt that are contiguous in a segment.

    Attributes:
        prompt_uid: uid of the prompt.
        first: Index of its first row in the segment.
        num_rows: Number of rows.
        num_tokens: Number of tokens in these rows.
        size_bytes: Size of their columns.
        oldest: Oldest policy version of their sampled tokens; -1 without sampled tokens.
        newest: Newest policy version of these tokens; -1 without sampled tokens.
    """

    prompt_uid: str
    first: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    oldest: int = -1
    newest: int = -1


class Issue(Message):
    """Issue prompts, given as (uid, encoded prompt)."""

    prompts: list[tuple[str, Any]]
    num_sessions: int
    is_retry: bool = False


class Reserve(Message):
    """Reserve capacity before rows are written; answered by `Reserved`."""

    sessions: list[tuple[str, list[int]]]
    num_rows: int
    size_bytes: int
    segment_bytes: int
    put_id: str
    deadline_s: float


class Put(Message):
    """Put written rows; `place` is their place in the backend's terms, `sessions` are the ones to settle.

    `reservation` comes from `Reserved`; 0 waits for capacity now.
    """

    sessions: list[tuple[str, list[int]]]
    parts: list[PartInfo]
    columns: list[str]
    place: Any
    put_id: str
    reservation: int
    deadline_s: float


class Fail(Message):
    """Settle a failed session."""

    prompt_uid: str
    session_index: int
    reason: str
    is_retry: bool = False


class Drop(Message):
    """Drop a prompt."""

    prompt_uid: str
    reason: str
    reissue: bool
    is_retry: bool = False


class LeaseRequest(Message):
    """Lease a number of groups for a task, or the groups of named prompts."""

    task: str
    groups: int
    lease_s: float
    deadline_s: float
    allow_fewer: bool
    prompts: list[str] = msgspec.field(default_factory=list)


class Extend(Message):
    """Extend a lease."""

    lease_id: int
    task: str
    lease_s: float


class Ack(Message):
    """Ack a lease; added columns are in a segment with the lease's rows.

    `place` and `reservation` have the same meaning as in `Put`.
    """

    lease_id: int
    task: str
    columns: list[str]
    size_bytes: int
    place: Any
    reservation: int = 0
    is_retry: bool = False


class Finish(Message):
    """Finish prompts without a lease; `number` identifies the request, and is negative, unlike lease numbers."""

    task: str
    prompts: list[str]
    number: int
    is_retry: bool = False


class Release(Message):
    """Release a lease."""

    lease_id: int


class Lost(Message):
    """Report a segment that cannot be read."""

    segment_id: int
    reason: str


class Unpin(Message):
    """Release segments that the client no longer reads."""

    segment_ids: list[int]


class SetPolicyVersion(Message):
    """Set the published policy version."""

    version: int


class StateQuery(Message):
    """Ask for the queue's state, or remove its finished prompts."""

    what: Literal["stats", "ledger", "unsettled", "recovery", "forget_finished"]


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
    | StateQuery
)


class LeasedGroup(msgspec.Struct, array_like=True, frozen=True):
    """One group of a lease.

    Attributes:
        prompt: Encoded prompt.
        sessions: Missing sessions, for a claim.
        parts: Segment, first row and number of rows of each part as it was put.
        late: The same for columns that tasks added, with their names; later entries override earlier ones.
    """

    prompt: Any
    sessions: list[int]
    parts: list[tuple[int, int, int]]
    late: list[tuple[int, int, int, list[str]]]


class Leased(Message):
    """Leased groups and the places of their segments; `columns` are those that the task may see."""

    lease_id: int
    expires_at: float
    groups: list[LeasedGroup]
    columns: list[str]
    places: dict[int, Any]


class Reserved(Message):
    """The place to write to."""

    reservation: int
    place: Any


class Done(Message):
    """The request succeeded; `value` is the answer to a `StateQuery`, or the new expiry of a lease."""

    value: Any = None


class Refused(Message):
    """The request failed; `kind` is the error's class in `rl_core.errors`."""

    kind: str
    text: str


Reply = Leased | Reserved | Done | Refused


class Hello(Message):
    """The first message of a connection: the client's id, equal for all connections of a process."""

    client: str


def as_retry(request: Request) -> Request:
    """Return the request marked as a retry, for use when its first answer may be lost."""
    if isinstance(request, Issue | Fail | Drop | Ack | Finish):
        return msgspec.structs.replace(request, is_retry=True)
    return request


def check_prompt(prompt: Prompt) -> None:
    """Check that a prompt's uid can be encoded.

    Raises:
        DataError: The uid is not a string that UTF-8 can encode.
    """
    try:
        prompt.uid.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the uid of a prompt must be valid Unicode; found {prompt.uid!r}.") from error


def encode_prompt(prompt: Prompt) -> bytes:
    """Encode a prompt as JSON.

    Raises:
        DataError: The messages, ground truth or columns cannot be encoded as JSON.
    """
    check_prompt(prompt)
    try:
        columns = dict(prompt.columns)
        messages = [dict(message) for message in prompt.messages]
        found = {one.name: getattr(prompt, one.name) for one in fields(Prompt)}
        found |= {"input_ids": prompt.input_ids.tolist(), "messages": messages, "columns": columns}
        return msgspec.json.encode(found)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(
            f"prompt {prompt.uid!r}, apart from its tokens, must consist of JSON values: {error}."
        ) from error


def decode_prompt(encoded: bytes) -> Prompt:
    """Decode a prompt from JSON.

    Raises:
        DataError: The JSON is not a prompt.
    """
    try:
        found = msgspec.json.decode(encoded)
        images = tuple(ImageSpan(**one) for one in found.pop("images", ()))
        return Prompt(**found, images=images)
    except (msgspec.MsgspecError, TypeError, AttributeError, DataError, ShapeError) as error:
        raise DataError(f"a prompt cannot be decoded: {error}.") from error


MAX_FRAME_BYTES = 1 << 30
FRAME = struct.Struct("<I")


def encode_frame(message: Any) -> bytes:
    """Encode a message with its length as a prefix."""
    body = _ENCODER.encode(message)
    return FRAME.pack(len(body)) + body


_ENCODER = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request | Hello).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
