"""The schema of a queue's database, and checks before its contents are trusted."""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

from rl_core.errors import JournalError
from rl_core.files import preview, require_plain

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
    """Refuse a journal whose files are pipes or devices, on which SQLite would block.

    Raises:
        JournalError: A file is not a regular file; the message names it.
    """
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"):
        if os.path.lexists(directory / name) and not (directory / name).is_dir():  # SQLite itself refuses folders
            require_plain(directory / name, error=JournalError)


def guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Configure a connection to an untrusted file: no large cells, and no code from the file's schema."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def refuse_altered(connection: sqlite3.Connection, directory: Path) -> None:
    """Refuse a journal with triggers, views, indices or tables that a queue does not create, or with broken pages.

    Raises:
        JournalError: The schema differs or a page is broken; the message names the objects.
    """
    differing = schema_of(connection) ^ model_schema()
    if differing:
        named = preview(sorted({str(name) for _, name, _, sql in differing if sql is not None}), most=200)
        raise JournalError(f"the queue in {directory} is damaged: {named} in {DATABASE} differ from the schema.")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise JournalError(f"the queue in {directory} is damaged: {preview(found, most=200)}.")


def schema_of(connection: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """Return every object of a database: type, name, table and SQL."""
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall())


def model_schema() -> set[tuple[Any, ...]]:
    """Return the result of `schema_of` for a valid journal."""
    with contextlib.closing(sqlite3.connect(":memory:")) as model:
        model.executescript(TABLES)
        return schema_of(model)
