"""Records of a queue's database, with bounds that are checked on reading."""

import sqlite3
from typing import Annotated, Any

import msgspec

from rl_core.errors import JournalError
from rl_core.queue.group import MAX_SESSIONS, LatePart, Part, QueuedGroup
from rl_core.queue.interface import PromptState

MAX_TOTAL_SESSIONS = 1 << 24
"""Listing more sessions takes minutes."""

UNREADABLE = (msgspec.MsgspecError, RecursionError, LookupError, TypeError, ValueError, ArithmeticError)
"""Exceptions raised for an altered record."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Version = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
"""A policy version; -1 means none."""

Lease = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]
"""A lease number; negative for groups finished without a lease."""


class JournaledGroup(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A group's record besides its uid, state and prompt; times are Unix seconds."""

    num_sessions: Annotated[int, msgspec.Meta(ge=1, le=MAX_SESSIONS)]
    issued_at: float
    attempt: Number
    reason: str | None
    settled: dict[Number, str]
    failures: dict[Number, str]
    parts: list[tuple[Number, Number, Number, Number, Number, Version, Version, list[str]]]
    late: list[tuple[Number, Number, Number, Number, str, list[str]]]
    acked: dict[str, Lease]


class QueueCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Counters of the whole queue."""

    policy_version: Version
    drops: dict[str, Number]
    counts: dict[str, Number]


def read_meta(connection: sqlite3.Connection) -> dict[str, bytes]:
    """Read the queue's metadata.

    Raises:
        JournalError: A key or value has another type.
    """
    found = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if not all(isinstance(key, str) and isinstance(value, bytes) for key, value in found.items()):
        raise JournalError("the journal's table meta must contain strings and bytes; it is damaged.")
    return found


def read_journal(connection: sqlite3.Connection) -> tuple[list[QueuedGroup], dict[int, Any], QueueCounts]:
    """Read the groups in issue order, the places of segments, and the counts.

    Raises:
        JournalError: A record cannot be read.
    """
    try:
        groups = [group_of(*row) for row in connection.execute("SELECT * FROM groups ORDER BY number")]
        rows = connection.execute("SELECT number, place FROM segments")
        places = {checked_number(number): msgspec.msgpack.decode(place) for number, place in rows}
        meta = read_meta(connection)
        counts = msgspec.json.decode(meta["counts"], type=QueueCounts) if "counts" in meta else QueueCounts(0, {}, {})
    except UNREADABLE as error:
        raise JournalError(f"the journal has an unreadable record: {error}.") from error
    total = sum(group.num_sessions for group in groups)
    if total > MAX_TOTAL_SESSIONS:
        raise JournalError(f"the journal must have at most {MAX_TOTAL_SESSIONS} sessions; found {total}.")
    missing = {number for group in groups for number in group.segments()} - places.keys()
    if missing:
        raise JournalError(f"the journal's groups refer to missing segments {sorted(missing)[:5]}.")
    return groups, places, counts


def checked_number(number: int) -> int:
    """Check that a number from the journal is below the maximum.

    Raises:
        ValidationError: The number is too large.
    """
    return msgspec.convert(number, Number)


class _NamedPrompt(msgspec.Struct):
    """The uid of an encoded prompt; its other fields are skipped."""

    uid: str


def group_of(number: int, uid: Any, state: Any, prompt: bytes, record: bytes) -> QueuedGroup:
    """Convert and check a row of the table of groups; an empty prompt is not checked."""
    named = msgspec.json.decode(prompt, type=_NamedPrompt).uid if prompt else uid
    if named != uid:
        raise ValueError(f"the row of prompt {uid!r} has the prompt {named!r}; one of the two was altered")
    found = msgspec.json.decode(record, type=JournaledGroup)
    group = QueuedGroup(
        uid=msgspec.convert(uid, str),
        order=checked_number(number),
        num_sessions=found.num_sessions,
        prompt=msgspec.convert(prompt, bytes),
        issued_at=found.issued_at,
        attempt=found.attempt,
        state=msgspec.convert(state, PromptState),
        reason=found.reason,
        settled=found.settled,
        failures=found.failures,
        acked=found.acked,
    )
    for part in found.parts:
        group.add_part(Part(*part[:7], frozenset(part[7])))
    for late in found.late:
        group.add_late(LatePart(*late[:5], frozenset(late[5])))
    return group
