"""The tables of a queue's database. Rows have a checksum of their other cells; a segment has its own."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import JournalError
from rl_core.files import checksum, preview

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
