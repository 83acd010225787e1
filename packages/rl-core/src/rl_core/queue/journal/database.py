"""A queue's journal in SQLite: groups, places of segments and counts, written before any answer is sent.

A `kill -9` loses no answered request: SQLite's commits are in the page cache. A power failure can lose the last
transactions and truncate segments; recovery detects and reports both.
"""

import contextlib
import fcntl
import itertools
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl_core.data.records import Prompt
from rl_core.errors import JournalError, RLError, SegmentError
from rl_core.files.locked_folders import open_lock_file
from rl_core.queue.capacity import SegmentStore
from rl_core.queue.core import QueueCore
from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.journal.records import (
    DATABASE,
    FORMAT_VERSION,
    SEGMENTS,
    TABLES,
    JournaledGroup,
    QueueCounts,
    check_database,
    read_journal,
    read_meta,
    readable,
    with_checksum,
)
from rl_core.queue.messages import encode_prompt

EPOCH_LEASES = 1 << 40
"""Range of lease and segment numbers for one server process; the next server uses the next range."""

LOCK_DEADLINE_S = 1.0
"""Maximum wait for the lock of a process that was just killed."""

WRITE_GROUP = """
INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (number) DO UPDATE
SET state = excluded.state, prompt = excluded.prompt, record = excluded.record, crc32c = excluded.crc32c
"""
WRITE_META = "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Findings when a queue was reopened.

    Attributes:
        prompts: Number of prompts in each state.
        num_acks: Number of valid acks over all tasks.
        num_unsettled: Number of prompts with sessions still to be generated.
        lost_segments: The problem of each unreadable segment; its prompts are issued again.
        removed_slots: Number of removed slots that were not referenced.
    """

    prompts: Mapping[str, int]
    num_acks: int
    num_unsettled: int
    lost_segments: tuple[str, ...]
    removed_slots: int


class SqliteJournal:
    """The journal of one queue, open in at most one server."""

    def __init__(
        self, directory: Path, tasks: Sequence[TaskSpec], options: QueueOptions, *, clock: Callable[[], float]
    ) -> None:
        """Open or create the journal in a directory.

        Raises:
            JournalError: Another process has the journal open, it is damaged or has another version, or its tasks
                differ.
        """
        self._directory, self._tasks, self._options, self._clock = directory, tasks, options, clock
        with translated(directory), contextlib.ExitStack() as opened:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.callback(os.close, lock_directory(directory))
            self._connection = opened.enter_context(contextlib.closing(connect(directory / DATABASE)))
            _refuse_lost(self._connection, directory)
            check_database(self._connection, directory)
            self._connection.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; {TABLES}")
            self._epoch = self._begin_epoch()
            self._opened = opened.pop_all()

    def write(self, core: QueueCore) -> None:
        """Write changes atomically.

        Raises:
            JournalError: The disk is full or failed.
        """
        counts = QueueCounts(core.policy_version, dict(core.drops), dict(core.counts))
        with translated(self._directory), self._transaction() as cursor:
            # Forgotten uids may be issued again.
            cursor.executemany("DELETE FROM groups WHERE number = ?", [(n,) for n in core.forgotten])
            cursor.executemany(WRITE_GROUP, [self._row(group) for group in core.dirty.values()])
            added = [
                (n, msgspec.msgpack.encode(core.segments.place(n))) for n in core.segments.added if n in core.segments
            ]
            cursor.executemany("INSERT INTO segments VALUES (?, ?)", added)
            cursor.executemany("DELETE FROM segments WHERE number = ?", [(n,) for n, _ in core.segments.freed])
            cursor.execute(WRITE_META, with_checksum("counts", msgspec.json.encode(counts)))

    def load(self, pins: Mapping[int, Counter[str]]) -> QueueCore:
        """Load the last written state; clients still read the segments in `pins`."""
        core = QueueCore(self._tasks, self._options)
        core.first_lease = self._epoch * EPOCH_LEASES + 1
        core.lease_ids = itertools.count(core.first_lease)
        with translated(self._directory):
            groups, places, counts = read_journal(self._connection, self._directory)
        core.policy_version, core.drops, core.counts = (
            counts.policy_version,
            Counter(counts.drops),
            Counter(counts.counts),
        )
        shift = self._clock() - time.time()
        for group in groups:
            group.issued_at += shift
        core.restore(groups, places, pins)
        core.segments.number_from(self._epoch * EPOCH_LEASES + 1)
        return core

    def recover(self, store: SegmentStore) -> tuple[QueueCore, Recovery]:
        """Recover the state after a crash or stop, issue prompts with unreadable rows again, and return a report."""
        core = self.load({})
        lost = []
        for number in list(core.segments):
            if number not in core.segments:
                continue  # freed together with a lost segment
            try:
                store.check(core.segments.place(number))
            except SegmentError as error:
                uids = sorted(group.uid for group in core.groups if number in group.segments())
                lost.append(f"segment {number} of prompts {', '.join(uids)}: {error}")
                core.lost(number, str(error), now=self._clock())
        self.write(core)
        core.dirty.clear()
        core.segments.freed.clear()
        report = Recovery(
            prompts=Counter(group.state for group in core.groups),
            num_acks=sum(len(group.acked) for group in core.groups),
            num_unsettled=len(core.groups.issued),
            lost_segments=tuple(lost),
            removed_slots=store.remove_others([core.segments.place(number) for number in core.segments]),
        )
        with translated(self._directory), self._transaction() as cursor:
            cursor.execute(WRITE_META, with_checksum("recovery", msgspec.json.encode(report)))
        return core, report

    def close(self) -> None:
        """Close the file and release the directory's lock. Can be called twice."""
        with contextlib.suppress(sqlite3.Error):
            self._opened.close()

    def _row(self, group: QueuedGroup) -> tuple[Any, ...]:
        prompt = encode_prompt(group.prompt) if isinstance(group.prompt, Prompt) else group.prompt
        record = msgspec.convert(group, JournaledGroup, from_attributes=True)
        record.issued_at += time.time() - self._clock()
        return with_checksum(group.order, group.uid, group.state, prompt, msgspec.json.encode(record))

    def _begin_epoch(self) -> int:
        tasks = msgspec.json.encode([msgspec.to_builtins(task, order="sorted") for task in self._tasks], order="sorted")
        with readable(self._directory):
            meta = read_meta(self._connection, self._directory)
            epoch = int(meta.get("epoch", b"0")) + 1
            names, expected = _task_names(meta.get("tasks", tasks)), _task_names(tasks)
        if names != expected:
            raise JournalError(
                f"{self._directory} is the queue of tasks {names}; found {expected}. Open it with its original tasks, "
                "or choose another directory."
            )
        with self._transaction() as cursor:
            rows = [("format", str(FORMAT_VERSION).encode()), ("tasks", tasks), ("epoch", str(epoch).encode())]
            cursor.executemany(WRITE_META, [with_checksum(*row) for row in rows])
        return epoch

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
            cursor.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                cursor.execute("ROLLBACK")
            raise


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection without implicit transactions; several threads may use it, one at a time."""
    uri = f"{path.resolve().as_uri()}?mode=rwc"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5.0)


def lock_directory(directory: Path) -> int:
    """Lock a directory for the life of the process, and return the descriptor.

    Raises:
        JournalError: Another process holds the lock.
        OSError: The lock file is a link or belongs to another user.
    """
    descriptor = open_lock_file(directory / "lock")
    ends_at = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() < ends_at:
                time.sleep(0.02)
                continue
            os.close(descriptor)
            raise JournalError(
                f"{directory} is open in another process; connect to that queue, or close it first."
            ) from error
        return descriptor


@contextlib.contextmanager
def translated(directory: Path) -> Iterator[None]:
    """Raise errors of SQLite and of the system as a JournalError."""
    try:
        yield
    except RLError:
        raise
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:  # sqlite3 decodes messages with damaged names
        text = getattr(error, "strerror", None) or error
        raise JournalError(f"the journal in {directory} cannot be used: {text}.") from error


def _task_names(encoded: bytes) -> list[str]:
    return sorted(
        task["name"] + (f" (gives {', '.join(sorted(task['gives']))})" if task["gives"] else "")
        for task in msgspec.json.decode(encoded)
    )


def _refuse_lost(connection: sqlite3.Connection, directory: Path) -> None:
    """Refuse an empty database beside segments."""
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    segments = [path for path in (directory / SEGMENTS).glob("*") if path.is_file()]
    if not num_tables and segments:
        raise JournalError(
            f"{directory} has {len(segments)} segments and an empty {DATABASE}: the journal was lost. Restore it, or "
            "remove the segments to start over."
        )
