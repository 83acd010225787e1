"""Tables and records of a queue's database. Rows have a checksum of their other cells; a segment has its own."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import JournalError
from rl_core.files import checksum, preview
from rl_core.queue.group import LatePart, Part, QueuedGroup
from rl_core.queue.interface import PromptState

FORMAT_VERSION = 4
DATABASE = "queue.sqlite3"
SEGMENTS = "segments"

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL, crc32c INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    prompt BLOB NOT NULL, record BLOB NOT NULL, crc32c INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, place BLOB NOT NULL);
"""


def with_checksum(*cells: Any) -> tuple[Any, ...]:
    """Return the cells of a row, followed by their checksum."""
    return *cells, checksum(msgspec.msgpack.encode(cells))


def read_rows(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    """Read a table in the order of its key, without the checksums.

    Raises:
        ValueError: A row differs from its checksum.
    """
    rows = connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()  # noqa: S608 - one of our tables
    for row in rows:
        if with_checksum(*row[:-1]) != row:
            raise ValueError(f"row {preview(row[0])} of {table} differs from its checksum")
    return [row[:-1] for row in rows]


def check_database(connection: sqlite3.Connection, directory: Path) -> None:
    """Refuse a database of another program, and one with broken pages, whose rows could be missing.

    Raises:
        JournalError: The database is not a queue's, or is damaged.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not tables >= {"meta", "groups", "segments"}:
        raise JournalError(
            f"{directory / DATABASE} is not a queue's journal: it has the tables {sorted(tables)}. "
            "Choose another directory."
        )
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise JournalError(f"the queue in {directory} is damaged: {preview(found, most=200)}.")


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
