"""Read-only inspection of a queue's directory, also while a server has it open or after a crash."""

import contextlib
import mmap
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_core.data.segment import decode_segment, segment_size
from rl_core.errors import JournalError, RLError, SegmentError
from rl_core.files.locked_folders import temporary_folder
from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import TaskSpec
from rl_core.queue.journal.database import READABLE_VERSIONS, Recovery
from rl_core.queue.journal.records import (
    MAX_TOTAL_SESSIONS,
    UNREADABLE,
    Counts,
    group_of,
    read_meta,
    read_places,
    refuse_partitions,
)
from rl_core.queue.journal.report import DamagedSegment, InspectedPrompt, JournalReport, SegmentsReport
from rl_core.queue.journal.schema import (
    DATABASE,
    SEGMENTS,
    guarded,
    model_schema,
    refuse_altered,
    require_plain_files,
    schema_of,
)
from rl_core.queue.journal.wal import read_wal

ADVICE = "Pass the directory set in QueueOptions(directory=...)."
MAX_NAMED = 3
"""Maximum number of prompts listed for a damaged segment."""


def inspect_journal(directory: Path, *, is_verified: bool = False, limit: int | None = None) -> JournalReport:
    """Inspect a queue's directory.

    Args:
        directory: Directory of the journal.
        is_verified: Verify every segment's checksum; otherwise check only sizes, headers and schemas.
        limit: Maximum number of prompts to return, in issue order; None returns all.

    Raises:
        JournalError: The directory is not a queue's, is damaged, or has another format version.
    """
    database = directory / DATABASE
    try:
        _require_queue(directory)
        num_transactions, torn_bytes = read_wal(_log_of(database))
        with _opened(database) as connection:
            found = _read(connection, directory)
        damaged = _damaged(directory, found, is_verified=is_verified)
        segments = _segments_report(directory, found, damaged, is_verified=is_verified)
    except (sqlite3.Error, *UNREADABLE) as error:
        if isinstance(error, RLError):
            raise
        raise JournalError(f"the queue in {directory} is damaged: {error}.") from error
    except OSError as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"the queue in {directory} cannot be read: {error.strerror or error}.") from error
    prompts = found.prompts
    return JournalReport(
        directory=str(directory),
        format_version=found.format_version,
        keeper_pid=server_pid(directory),
        tasks=found.tasks,
        policy_version=found.counts.policy_version,
        states=Counter(prompt.state for prompt in prompts),
        num_rows=sum(prompt.num_rows for prompt in prompts),
        num_tokens=sum(prompt.num_tokens for prompt in prompts),
        size_bytes=sum(prompt.size_bytes for prompt in prompts),
        acks={task.name: sum(task.name in prompt.acked_by for prompt in prompts) for task in found.tasks},
        drops=found.counts.drops,
        counts=found.counts.counts,
        recovery=found.recovery,
        wal_transactions=num_transactions,
        wal_torn_bytes=torn_bytes,
        segments=segments,
        prompts=tuple(prompts[:limit]),
        num_prompts_left_out=len(prompts) - len(prompts[:limit]),
    )


def server_pid(directory: Path) -> int | None:
    """Return the process that has a queue's directory open, if the system reports it; acquires no lock."""
    try:
        inode = (directory / "lock").stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # such as "3: FLOCK  ADVISORY  WRITE 28756 fe:00:2238836 0 EOF"
        words = line.split()
        if words[1:2] == ["FLOCK"] and words[5].rpartition(":")[2] == str(inode) and words[4].isdigit():
            return int(words[4])
    return None


# -- the database


class _Found(NamedTuple):
    """Results of one pass through the database; `places` and `uids` describe the segments that prompts need."""

    format_version: int
    tasks: tuple[TaskSpec, ...]
    counts: Counts
    recovery: Recovery | None
    prompts: list[InspectedPrompt]
    places: dict[int, Any]
    uids: dict[int, list[str]]


def _require_queue(directory: Path) -> None:
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise JournalError(f"{directory} must be a queue's directory; found {found}. {ADVICE}")
    if not (directory / DATABASE).exists():
        raise JournalError(f"{directory} must contain a queue's {DATABASE}; found no such file. {ADVICE}")
    require_plain_files(directory)


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}-wal")


@contextlib.contextmanager
def _opened(database: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection in one read transaction.

    If a log exists, a server may be running; SQLite reads concurrently, and may rewrite its index of the log. On a
    read-only file system, database and log are copied first. Without a log, the database is opened as immutable,
    because SQLite would otherwise leave a log and an index behind.
    """
    before = _state_of(database)
    if before[1] == 0:
        with contextlib.closing(_connect(database, "immutable=1")) as connection:
            _check_format(connection, database.parent)
            try:
                yield connection
            finally:
                if _state_of(database) != before:
                    raise JournalError(f"a server opened {database.parent} during the read. Try again.")
            return
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(contextlib.closing(_connect(database, "mode=ro")))
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            folder = stack.enter_context(temporary_folder("rl-core-inspect-"))
            for path in (database, _log_of(database)):
                shutil.copyfile(path, folder / path.name)
            connection = stack.enter_context(contextlib.closing(_connect(folder / database.name, "mode=ro")))
        connection.execute("BEGIN")
        _check_format(connection, database.parent)
        yield connection


def _state_of(database: Path) -> tuple[int, int]:
    """Return the database's modification time and the size of its log."""
    log = _log_of(database)
    return database.stat().st_mtime_ns, log.stat().st_size if log.exists() else 0


def _connect(database: Path, mode: str) -> sqlite3.Connection:
    uri = f"{database.resolve().as_uri()}?mode=ro&{mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
    connection.execute("PRAGMA query_only = ON")
    return guarded(connection)


def _check_format(connection: sqlite3.Connection, directory: Path) -> None:
    """Refuse foreign databases before running any query: a view could run forever."""
    try:
        found = _tables(connection)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname != "SQLITE_NOTADB":
            raise
        raise JournalError(f"{directory / DATABASE} must be a queue's database; {error}. {ADVICE}") from error
    model = next(sql for kind, name, _, sql in model_schema() if (kind, name) == ("table", "meta"))
    if found.get("meta") != model:
        named = ", ".join(sorted(found)) or "none"
        raise JournalError(f"{directory / DATABASE} must be a queue's database; its tables are: {named}. {ADVICE}")
    version = read_meta(connection).get("format", b"none")
    if version not in [str(readable).encode() for readable in READABLE_VERSIONS]:
        raise JournalError(
            f"{directory} has format {version[:80].decode(errors='backslashreplace')}; this version of rl-core reads "
            f"formats {' and '.join(map(str, READABLE_VERSIONS))}. Inspect it with the version that wrote it."
        )
    refuse_altered(connection, directory)


def _tables(connection: sqlite3.Connection) -> dict[str, str]:
    return {str(name): sql for kind, name, _, sql in schema_of(connection) if kind in ("table", "view")}


def _read(connection: sqlite3.Connection, directory: Path) -> _Found:
    meta = read_meta(connection)
    if "tasks" not in meta:
        raise JournalError(f"the queue in {directory} is damaged: its tasks are missing.")
    refuse_partitions(meta["tasks"], directory)
    tasks = msgspec.json.decode(meta["tasks"], type=tuple[TaskSpec, ...])
    counts = msgspec.json.decode(meta["counts"], type=Counts) if "counts" in meta else Counts(0, {}, {})
    recovery = msgspec.json.decode(meta["recovery"], type=Recovery) if "recovery" in meta else None
    places = read_places(connection)
    prompts: list[InspectedPrompt] = []
    num_sessions = 0
    uids: dict[int, list[str]] = {}
    for row in connection.execute("SELECT number, uid, state, x'', record FROM groups ORDER BY number"):
        try:
            group = group_of(*row)
        except UNREADABLE as error:
            raise JournalError(
                f"the queue in {directory} is damaged: prompt {row[1]!r} is unreadable: {error}."
            ) from error
        missing = sorted(set(group.segments()) - places.keys())
        if missing:
            raise JournalError(
                f"the queue in {directory} is damaged: prompt {group.uid!r} refers to missing segments {missing}."
            )
        for number in set(group.segments()):
            uids.setdefault(number, []).append(group.uid)
        num_sessions += group.num_sessions
        if num_sessions > MAX_TOTAL_SESSIONS:
            raise JournalError(f"the queue in {directory} is damaged: it has more than {MAX_TOTAL_SESSIONS} sessions.")
        prompts.append(_prompt_of(group))
    needed = {number: place for number, place in places.items() if number in uids}
    return _Found(int(meta["format"]), tasks, counts, recovery, prompts, needed, uids)


def _prompt_of(group: QueuedGroup) -> InspectedPrompt:
    entry = group.entry()
    return InspectedPrompt(
        uid=group.uid,
        state=group.state,
        attempt=group.attempt,
        num_sessions=group.num_sessions,
        sessions_settled=entry.sessions_settled,
        sessions_failed=entry.sessions_failed,
        sessions_missing=tuple(group.missing_sessions),
        num_rows=group.num_rows,
        num_tokens=group.num_tokens,
        size_bytes=group.size_bytes,
        policy_versions=entry.policy_versions,
        acked_by=tuple(sorted(group.acked)),
        reason=group.reason,
        issued_at=group.issued_at,
    )


# -- segments


def _damaged(directory: Path, found: _Found, *, is_verified: bool) -> list[DamagedSegment]:
    reasons = {}
    for number, place in found.places.items():
        try:
            _check_segment(directory / SEGMENTS, place, is_verified=is_verified)
        except SegmentError as error:
            reasons[number] = str(error)
    if not reasons:
        return []
    with _opened(directory / DATABASE) as connection:  # a server may have freed some meanwhile
        now = read_places(connection)
    return [
        DamagedSegment(number=number, prompts=tuple(found.uids[number][:MAX_NAMED]), reason=reason)
        for number, reason in reasons.items()
        if now.get(number) == found.places[number]
    ]


def _check_segment(folder: Path, place: Any, *, is_verified: bool) -> None:
    check = decode_segment if is_verified else segment_size
    file = _file_of(place)
    if isinstance(place, bytes):
        check(place)
    elif file is not None:
        with _mapped(folder, *file) as memory:
            check(memory)


def _file_of(place: Any) -> tuple[str, int] | None:
    """Return the name and size of a segment's file: a slot, or a file that a queue on Ray wrote."""
    match place:
        case [str(name), int(size)]:
            return name, size
        case [_, str(_), int(size), str(path)]:
            return Path(path).name, size
    return None


@contextlib.contextmanager
def _mapped(folder: Path, name: str, size: int) -> Iterator[memoryview]:
    """Map a file read-only.

    Raises:
        SegmentError: The file is missing or too short.
    """
    if "/" in name or "\0" in name:
        raise SegmentError(f"a segment's file must be in {SEGMENTS}; found {name!r}.")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentError(f"file {name} cannot be opened: {error.strerror}.") from error
    try:
        found = os.fstat(descriptor).st_size
        if found < size or size < 1:
            raise SegmentError(f"file {name} must have {size} bytes; found {found}.")
        content = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    yield memoryview(content)


def _segments_report(
    directory: Path, found: _Found, damaged: list[DamagedSegment], *, is_verified: bool
) -> SegmentsReport:
    inline = [len(place) for place in found.places.values() if isinstance(place, bytes)]
    files = dict(file for file in map(_file_of, found.places.values()) if file is not None)
    others = [path for path in (directory / SEGMENTS).glob("*") if path.name not in files]
    return SegmentsReport(
        num_inline=len(inline),
        inline_bytes=sum(inline),
        num_files=len(files),
        file_bytes=sum(files.values()),
        num_elsewhere=len(found.places) - len(inline) - len(files),
        num_other_files=len(others),
        other_bytes=sum(_size_of(path) for path in others),
        damaged=tuple(damaged),
        is_verified=is_verified,
    )


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # a server has removed it
        return 0
