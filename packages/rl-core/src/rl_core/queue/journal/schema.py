"""The form of a queue's database, and what is refused before anything in it is believed."""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

from rl_core.errors import JournalError
from rl_core.files import require_plain, shown

DATABASE = "queue.sqlite3"
SEGMENTS = "segments"
MAX_CELL_BYTES = 1 << 28

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    prompt BLOB NOT NULL, record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, place BLOB NOT NULL);
"""


def require_plain_files(directory: Path) -> None:
    """Refuse a journal whose files are pipes or devices, for which SQLite would wait.

    Raises:
        JournalError: Names the file.
    """
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"):
        if os.path.lexists(directory / name) and not (directory / name).is_dir():  # SQLite itself refuses folders
            require_plain(directory / name, error=JournalError)


def guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A connection to a file that may say anything: no large cells, nothing that the file would have run."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def refuse_altered(connection: sqlite3.Connection, directory: Path) -> None:
    """Refuse a journal that has triggers, views, indices or tables that a queue does not make, or broken pages.

    Raises:
        JournalError: Names them.
    """
    differing = schema_of(connection) ^ model_schema()
    if differing:
        named = shown(sorted({str(name) for _, name, _, sql in differing if sql is not None}), most=200)
        raise JournalError(f"the queue in {directory} is damaged: {named} in {DATABASE} are not as they were made.")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise JournalError(f"the queue in {directory} is damaged: {shown(found, most=200)}.")


def schema_of(connection: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """Everything that a database has: its type, name, table, and how it was made."""
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall())


def model_schema() -> set[tuple[Any, ...]]:
    """What `schema_of` says of a queue's journal."""
    with contextlib.closing(sqlite3.connect(":memory:")) as model:
        model.executescript(TABLES)
        return schema_of(model)
