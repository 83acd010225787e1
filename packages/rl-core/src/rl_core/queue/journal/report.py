"""The report of `inspect_journal`; its fields are the keys of `rl-core queue inspect --json`."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.queue.interface import PromptState, TaskSpec
from rl_core.queue.journal.database import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPrompt:
    """The state of one prompt.

    Attributes:
        uid: uid of the prompt.
        state: "issued", "settled", "done" or "dropped".
        attempt: Starts at 1 and increases by one each time the prompt is issued again.
        num_sessions: Number of sessions it was issued with.
        sessions_settled: Number of sessions that were put, with or without rows, or failed.
        sessions_failed: Reason for each failed session, by index.
        sessions_missing: Indices of unsettled sessions.
        num_rows: Number of stored rows.
        num_tokens: Number of tokens in these rows.
        size_bytes: Size of these rows' columns.
        policy_versions: Oldest and newest policy version of its sampled tokens; None without sampled tokens.
        acked_by: Tasks that have acked.
        reason: Why it was dropped or issued again.
        issued_at: Unix time in seconds.
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
        number: Number of the segment.
        prompts: Some of the prompts with rows in it; opening the queue issues them again.
        reason: Why it cannot be read.
    """

    number: int
    prompts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsReport:
    """The segments that prompts need.

    Attributes:
        num_inline: Number of small segments in the database.
        inline_bytes: Size of these segments.
        num_files: Number of segments in files.
        file_bytes: Size of these files.
        num_elsewhere: Number of segments in places known only to the backend; they are not checked.
        num_other_files: Number of files that no segment needs: free slots, and slots being written.
        other_bytes: Size of these other files.
        damaged: Missing, truncated and altered segments.
        is_verified: True if every checksum was verified; False if only sizes, headers and schemas were checked.
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
    """The contents of a queue's directory.

    Attributes:
        directory: Path of the directory.
        format_version: Format version of the journal.
        keeper_pid: Process that has it open; None if no process of this host does, or if the system does not report it.
        tasks: Tasks with which the queue was last opened.
        policy_version: Newest policy version in the journal.
        states: Number of prompts in each state.
        num_rows: Number of stored rows.
        num_tokens: Number of tokens in these rows.
        size_bytes: Size of these rows' columns.
        acks: Number of prompts that each task has acked, excluding forgotten ones.
        drops: Number of dropped prompts, by the first words of the reason.
        counts: Other counters of the queue.
        recovery: Findings when it was last opened.
        wal_transactions: Number of complete transactions in the write-ahead log.
        wal_torn_bytes: Bytes of an incomplete transaction after them; a running server may still be writing it.
        segments: Places and problems of the segments.
        prompts: Prompts in issue order.
        num_prompts_left_out: Number of prompts beyond the limit.
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
