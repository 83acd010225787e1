"""What a queue's directory says: the report of `inspect_journal`, and the keys of `rl-core queue inspect --json`."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.queue.interface import PromptState, TaskSpec
from rl_core.queue.journal.database import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPrompt:
    """Where one prompt stands.

    Attributes:
        uid: Which prompt.
        state: "issued", "settled", "done" or "dropped".
        attempt: 1, and one more each time that it was issued again.
        num_sessions: How many it was issued with.
        sessions_settled: Sessions that gave rows, or none, or failed.
        sessions_failed: Reason of each failed session, by its index.
        sessions_missing: Indices of sessions that are not settled.
        num_rows: Rows held.
        num_tokens: Tokens of these rows.
        size_bytes: Bytes of these rows' columns.
        policy_versions: Oldest and newest policy version of its sampled tokens; None without any.
        acked_by: Tasks that have acked.
        reason: Why it was dropped, or issued again.
        issued_at: Seconds since 1970.
    """

    uid: str
    state: PromptState
    attempt: int
    num_sessions: int
    sessions_settled: int
    sessions_failed: Mapping[int, str]
    sessions_missing: tuple[int, ...]
    num_rows: int
    num_tokens: int
    size_bytes: int
    policy_versions: tuple[int, int] | None
    acked_by: tuple[str, ...]
    reason: str | None
    issued_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedSegment:
    """A segment that cannot be read.

    Attributes:
        number: Which.
        prompts: Some of the prompts that have rows in it; they are issued again when the queue is opened.
        reason: What is wrong.
    """

    number: int
    prompts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsReport:
    """The segments that prompts need.

    Attributes:
        num_inline: Small ones, which lie in the database.
        inline_bytes: Their bytes.
        num_files: Those that lie in files.
        file_bytes: Size of these files.
        num_elsewhere: Those that lie where only the backend knows; nothing is said about them.
        num_other_files: Files that no segment needs: free slots, and such that are being written.
        other_bytes: Their size.
        damaged: What is missing, torn or altered.
        is_verified: Every checksum was taken; otherwise only sizes, headers and schemas were looked at.
    """

    num_inline: int
    inline_bytes: int
    num_files: int
    file_bytes: int
    num_elsewhere: int
    num_other_files: int
    other_bytes: int
    damaged: tuple[DamagedSegment, ...]
    is_verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalReport:
    """A queue's directory.

    Attributes:
        directory: Where.
        format_version: Of the journal.
        keeper_pid: Process that has it open; None when no process of this host has, or the system does not say.
        tasks: As the queue was opened last.
        policy_version: The newest that the journal has.
        states: Prompts in each state.
        num_rows: Rows held.
        num_tokens: Tokens of these rows.
        size_bytes: Bytes of these rows' columns.
        acks: Prompts that each task has acked, as far as they are not forgotten.
        drops: Prompts dropped so far, by the beginning of their reason.
        counts: What else the queue counts.
        recovery: What was found when it was opened last.
        wal_transactions: Whole transactions in the write-ahead log.
        wal_torn_bytes: Bytes after them, of one that was cut off; with a server, of one that is being written.
        segments: Where rows lie, and what is wrong there.
        prompts: In the order of issue.
        num_prompts_left_out: Prompts beyond the limit.
    """

    directory: str
    format_version: int
    keeper_pid: int | None
    tasks: tuple[TaskSpec, ...]
    policy_version: int
    states: Mapping[str, int]
    num_rows: int
    num_tokens: int
    size_bytes: int
    acks: Mapping[str, int]
    drops: Mapping[str, int]
    counts: Mapping[str, int]
    recovery: Recovery | None
    wal_transactions: int
    wal_torn_bytes: int
    segments: SegmentsReport
    prompts: tuple[InspectedPrompt, ...]
    num_prompts_left_out: int
