"""The report of a queue's directory as text that is safe for terminals."""

from collections.abc import Iterable, Iterator, Mapping

from rl_core.queue.interface import TaskSpec
from rl_core.queue.journal.database import Recovery
from rl_core.queue.journal.report import InspectedPrompt, JournalReport
from rl_core.terminal_text import bytes_text, printable, table_lines

MAX_DAMAGED = 10
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
STATES = ("issued", "settled", "done", "dropped")
RIGHT = frozenset({"attempt", "settled", "failed", "missing", "rows", "tokens"})


def as_text(report: JournalReport) -> str:
    """Format the whole report: facts about the queue, then a table with one line per prompt."""
    return "\n".join([*_head(report), "", *_table(report)]) + "\n"


def _head(report: JournalReport) -> Iterator[str]:
    keeper = "not open" if report.keeper_pid is None else f"open in process {report.keeper_pid}"
    yield f"queue {printable(report.directory, width=None)}: format {report.format_version}, {keeper}"
    lines = [*(("task", _task(task)) for task in report.tasks), *_facts(report)]
    for name, value in lines:
        yield f"  {name:<15} {value}"


def _facts(report: JournalReport) -> Iterator[tuple[str, str]]:
    yield "policy version", str(report.policy_version)
    yield "prompts", f"{sum(report.states.values())}: {_states(report.states)}"
    yield "stored", f"{report.num_rows} rows, {report.num_tokens} tokens, {bytes_text(report.size_bytes)} of columns"
    yield "acks", _counts(report.acks)
    yield "drops", _counts(report.drops)
    yield "counts", _counts(report.counts)
    yield "recovery", _recovery(report.recovery)
    yield "journal", _wal(report)
    yield from _segments(report)


def _task(task: TaskSpec) -> str:
    said = [f"{printable(task.name)}: needs {_names(task.needs)}"]
    if task.gives:
        said.append(f"gives {_names(task.gives)}")
    said.append(f"order {task.order}")
    if task.max_staleness is not None:
        said.append(f"max_staleness {task.max_staleness}")
    return "; ".join(said)


def _recovery(recovery: Recovery | None) -> str:
    if recovery is None:
        return "none"
    said = [
        f"at the last open: {_states(recovery.prompts)}",
        f"{recovery.num_acks} acks",
        f"{recovery.num_unsettled} to generate",
        f"{recovery.torn_journal_bytes} bytes of an incomplete transaction ignored",
        f"{len(recovery.lost_segments)} segments lost",
        f"{recovery.removed_slots} files removed",
    ]
    return "; ".join(said)


def _wal(report: JournalReport) -> str:
    torn = "none incomplete"
    if report.wal_torn_bytes:
        what = "of an incomplete one" if report.keeper_pid is None else "of one being written"
        torn = f"then {report.wal_torn_bytes} bytes {what}"
    return f"{report.wal_transactions} complete transactions in the log, {torn}"


def _segments(report: JournalReport) -> Iterator[tuple[str, str]]:
    found = report.segments
    said = [
        f"{found.num_inline} in the database ({bytes_text(found.inline_bytes)})",
        f"{found.num_files} in files ({bytes_text(found.file_bytes)})",
        f"{found.num_other_files} other files ({bytes_text(found.other_bytes)})",
    ]
    if found.num_elsewhere:
        said.append(f"{found.num_elsewhere} elsewhere")
    yield "segments", ", ".join(said)
    how = "all checksums verified" if found.is_verified else "sizes, headers and schemas; --verify checks checksums"
    yield "damaged", f"{len(found.damaged) or 'none'} ({how})"
    for segment in found.damaged[:MAX_DAMAGED]:
        uids = ", ".join(printable(uid) for uid in segment.prompts) or "none"
        yield "", f"segment {segment.number}, prompts {uids}: {printable(segment.reason, width=200)}"
    if len(found.damaged) > MAX_DAMAGED:
        yield "", f"and {len(found.damaged) - MAX_DAMAGED} more; --json lists all"


def _table(report: JournalReport) -> Iterator[str]:
    if report.prompts:
        yield from table_lines(COLUMNS, [_row(prompt) for prompt in report.prompts], right=RIGHT)
    if report.num_prompts_left_out:
        yield f"and {report.num_prompts_left_out} more prompts; --limit N shows more"
    elif not report.prompts:
        yield "no prompts"


def _row(prompt: InspectedPrompt) -> tuple[str, ...]:
    versions = prompt.policy_versions
    return (
        printable(prompt.uid),
        prompt.state,
        str(prompt.attempt),
        f"{prompt.sessions_settled}/{prompt.num_sessions}",
        str(len(prompt.sessions_failed)),
        str(len(prompt.sessions_missing)),
        str(prompt.num_rows),
        str(prompt.num_tokens),
        "-" if versions is None else str(versions[0]) if versions[0] == versions[1] else f"{versions[0]}-{versions[1]}",
        printable(",".join(prompt.acked_by)) or "-",
        printable(prompt.reason or "") or "-",
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(printable(name) for name in sorted(names)) or "nothing"


def _states(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts.get(state)) or "no prompts"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(name)} {value}" for name, value in sorted(counts.items())) or "none"
