"""Records of a queue's database."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import JournalError
from rl_core.queue.group import LatePart, Part, QueuedGroup
from rl_core.queue.interface import PromptState
from rl_core.queue.journal.schema import read_rows

FORMAT_VERSION = 4


class JournaledGroup(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A group's record besides its uid, state and prompt; times are Unix seconds."""

    num_sessions: int
    issued_at: float
    attempt: int
    reason: str | None
    settled: dict[int, str]
    failures: dict[int, str]
    parts: list[Part]
    late: list[LatePart]
    acked: dict[str, int]


class QueueCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Counters of the whole queue."""

    policy_version: int
    drops: dict[str, int]
    counts: dict[str, int]


@contextmanager
def readable(directory: Path) -> Iterator[None]:
    """Raise errors of a damaged record as a JournalError; msgspec's errors are ValueErrors."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        raise JournalError(f"the journal in {directory} has an unreadable record: {error}.") from error


def read_meta(connection: sqlite3.Connection, directory: Path) -> dict[str, bytes]:
    """Read the queue's metadata; empty for a new journal.

    Raises:
        JournalError: This version of rl-core cannot read the journal's format.
        ValueError: A row is damaged.
    """
    found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if found is not None and int(found[0]) != FORMAT_VERSION:
        raise JournalError(
            f"{directory} has format {int(found[0])}; expected {FORMAT_VERSION}. Finish its prompts with the version "
            "of rl-core that wrote it, or choose another directory."
        )
    return dict(read_rows(connection, "meta"))


def read_journal(
    connection: sqlite3.Connection, directory: Path
) -> tuple[list[QueuedGroup], dict[int, Any], QueueCounts]:
    """Read the groups in issue order, the places of segments, and the counts.

    Raises:
        JournalError: A row is damaged.
    """
    with readable(directory):
        groups = [group_of(*row) for row in read_rows(connection, "groups")]
        rows = connection.execute("SELECT number, place FROM segments")
        places = {number: msgspec.msgpack.decode(place) for number, place in rows}
        meta = dict(read_rows(connection, "meta"))
        counts = msgspec.json.decode(meta["counts"], type=QueueCounts) if "counts" in meta else QueueCounts(0, {}, {})
    missing = {number for group in groups for number in group.segments()} - places.keys()
    if missing:
        raise JournalError(f"the journal's groups refer to missing segments {sorted(missing)[:5]}.")
    return groups, places, counts


def group_of(number: int, uid: str, state: PromptState, prompt: bytes, record: bytes) -> QueuedGroup:
    """Convert a row of the table of groups."""
    fields = msgspec.structs.asdict(msgspec.json.decode(record, type=JournaledGroup))
    parts, late = fields.pop("parts"), fields.pop("late")
    group = QueuedGroup(uid=uid, order=number, prompt=prompt, state=state, **fields)
    for part in parts:
        group.add_part(part)
    for part in late:
        group.add_late(part)
    return group
