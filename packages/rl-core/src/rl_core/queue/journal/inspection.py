"""Read-only inspection of a queue's directory, also while a server has it open or after a crash."""

import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl_core.errors import JournalError
from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import STATES, TaskSpec
from rl_core.queue.journal.database import Recovery, translated
from rl_core.queue.journal.records import DATABASE, FORMAT_VERSION, check_database, read_journal, read_meta, readable
from rl_core.terminal_text import bytes_text, printable, table_lines

COLUMNS = (
    "uid",
    "state",
    "attempt",
    "settled",
    "failed",
    "missing",
    "rows",
    "tokens",
    "versions",
    "acked by",
    "reason",
)
RIGHT = frozenset({"attempt", "settled", "failed", "missing", "rows", "tokens"})


def inspect_journal(directory: Path, *, limit: int | None = None) -> dict[str, Any]:
    """Inspect a queue's directory.

    Args:
        directory: Directory of the journal.
        limit: Maximum number of prompts to return, in issue order; None returns all.

    Returns:
        The object of `rl-core queue inspect --json`; docs/guides/transfer-queue.md has its keys.

    Raises:
        JournalError: The directory is not a queue's, is damaged, or has another format version.
    """
    if not os.path.lexists(directory / DATABASE):
        raise JournalError(
            f"{directory} must be a queue's directory, with {DATABASE}; found none. Pass the directory set in "
            "QueueOptions(directory=...)."
        )
    with translated(directory), _opened(directory) as connection, readable(directory):
        return _report(connection, directory, limit)


def as_text(report: Mapping[str, Any]) -> str:
    """Format a report for a terminal: facts about the queue, then a table with one line per prompt."""
    facts = [*(("task", _task(task)) for task in report["tasks"]), *_facts(report)]
    head = f"queue {printable(report['directory'], width=None)}: format {report['format_version']}"
    table = table_lines(COLUMNS, [_row(prompt) for prompt in report["prompts"]], right=RIGHT)
    left_out = report["num_prompts_left_out"]
    more = [f"and {left_out} more prompts; --limit N shows more"] if left_out else []
    return "\n".join([head, *(f"  {name:<15} {value}" for name, value in facts), "", *table, *more]) + "\n"


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[sqlite3.Connection]:
    """Open the database read-only, in one read transaction.

    If it has a log, a server may be running; SQLite reads concurrently. Without a log, the database is opened as
    immutable, because SQLite would otherwise leave a log and an index behind. A server that opens it meanwhile could
    change pages between two reads, so the read is then refused.
    """
    database, log = directory / DATABASE, directory / f"{DATABASE}-wal"

    def state() -> tuple[int, int]:
        return database.stat().st_mtime_ns, log.stat().st_size if log.exists() else 0

    before = state()
    is_immutable = before[1] == 0
    uri = f"{database.resolve().as_uri()}?mode=ro&immutable={int(is_immutable)}"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)) as connection:
            connection.execute("BEGIN")
            check_database(connection, directory)
            yield connection
    finally:
        if is_immutable and state() != before:
            raise JournalError(f"a server opened {directory} during the read. Try again.")


def _report(connection: sqlite3.Connection, directory: Path, limit: int | None) -> dict[str, Any]:
    meta = read_meta(connection, directory)
    tasks = msgspec.json.decode(meta["tasks"], type=tuple[TaskSpec, ...])
    recovery = msgspec.json.decode(meta.get("recovery", b"null"), type=Recovery | None)
    groups, _, counts = read_journal(connection, directory)
    issued_at = [group.issued_at for group in groups if group.state == "issued"]
    return {
        "directory": str(directory),
        "format_version": FORMAT_VERSION,
        "tasks": msgspec.to_builtins(tasks, order="deterministic"),
        "policy_version": counts.policy_version,
        "states": dict(Counter(group.state for group in groups)),
        "oldest_issued_s": time.time() - min(issued_at) if issued_at else None,
        "num_rows": sum(group.num_rows for group in groups),
        "num_tokens": sum(group.num_tokens for group in groups),
        "size_bytes": sum(group.size_bytes for group in groups),
        "acks": {task.name: sum(task.name in group.acked for group in groups) for task in tasks},
        "drops": counts.drops,
        "counts": counts.counts,
        "recovery": msgspec.to_builtins(recovery),
        "prompts": [_prompt(group) for group in groups[:limit]],
        "num_prompts_left_out": len(groups) - len(groups[:limit]),
    }


def _prompt(group: QueuedGroup) -> dict[str, Any]:
    entry = msgspec.to_builtins(group.entry(), order="deterministic", str_keys=True)
    return {
        "uid": entry.pop("prompt_uid"),
        **entry,
        "num_sessions": group.num_sessions,
        "sessions_missing": group.missing_sessions,
        "size_bytes": group.size_bytes,
        "issued_at": group.issued_at,
    }


# -- text


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    states, oldest_s, recovery = report["states"], report["oldest_issued_s"], report["recovery"]
    yield "policy version", str(report["policy_version"])
    yield "prompts", f"{sum(states.values())}: {_states(states)}"
    yield "oldest issued", "none" if oldest_s is None else f"{oldest_s:.0f} s ago"
    size = bytes_text(report["size_bytes"])
    yield "stored", f"{report['num_rows']} rows, {report['num_tokens']} tokens, {size} of columns"
    for name in ("acks", "drops", "counts"):
        yield name, ", ".join(f"{printable(key)} {value}" for key, value in sorted(report[name].items())) or "none"
    lost = "" if recovery is None else f"; {len(recovery['lost_segments'])} segments lost"
    yield "last open", "none" if recovery is None else f"{_states(recovery['prompts'])}{lost}"


def _task(task: Mapping[str, Any]) -> str:
    parts = [f"{printable(task['name'])}: needs {_names(task['needs'])}"]
    if task["gives"]:
        parts.append(f"gives {_names(task['gives'])}")
    parts.append(f"order {task['order']}")
    if task["max_staleness"] is not None:
        parts.append(f"max_staleness {task['max_staleness']}")
    return "; ".join(parts)


def _row(prompt: Mapping[str, Any]) -> tuple[str, ...]:
    oldest, newest = prompt["policy_versions"] or ("-", "-")
    return (
        printable(prompt["uid"]),
        prompt["state"],
        str(prompt["attempt"]),
        f"{prompt['sessions_settled']}/{prompt['num_sessions']}",
        str(len(prompt["sessions_failed"])),
        str(len(prompt["sessions_missing"])),
        str(prompt["num_rows"]),
        str(prompt["num_tokens"]),
        str(newest) if oldest == newest else f"{oldest}-{newest}",
        printable(",".join(prompt["acked_by"])) or "-",
        printable(prompt["reason"] or "") or "-",
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(printable(name) for name in sorted(names)) or "nothing"


def _states(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts.get(state)) or "no prompts"
