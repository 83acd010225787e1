"""The transfer queue: producers put sessions, tasks lease whole groups, add columns, and ack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from rl_core.data.batch import Batch, Column
from rl_core.data.records import Prompt, Trajectory

DEFAULT_DEADLINE_S = 1800.0
DEFAULT_LEASE_S = 3600.0

PromptState = Literal["issued", "settled", "done", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A kind of work on rows.

    Attributes:
        name: Such as "reference" or "train".
        needs: Columns that a row must have before the task can lease it.
        gives: Columns that the task adds when it acks.
        order: "arrival" delivers groups as they become ready, "issue" strictly as their prompts were issued: a
            group waits for those before it, and the same prompts give the same order in every run.
        max_staleness: Groups whose oldest token is of a policy version further behind the queue's than this are
            dropped when they would be leased.
    """

    name: str
    needs: frozenset[str]
    gives: frozenset[str] = frozenset()
    order: Literal["arrival", "issue"] = "arrival"
    max_staleness: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """What every backend can be told.

    Attributes:
        capacity_rows: `put` waits while this many rows are held and some of them can be consumed; it does not
            wait when every consumer waits for more groups than there are.
        capacity_bytes: The same in bytes of columns.
        directory: Where the journal and the rows are kept, so that the queue can be opened again after a crash;
            in memory only, when None. An existing journal is resumed.
    """

    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    directory: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups handed to one consumer until it acks, releases, or the time runs out.

    Attributes:
        lease_id: Unique in the queue.
        task: Name of the task.
        prompts: The leased prompts, in the task's order.
        batch: All rows of these prompts, in the order of prompts, sessions and outputs.
        expires_at: Time on the queue's clock after which the groups are delivered again.
    """

    lease_id: int
    task: str
    prompts: tuple[Prompt, ...]
    batch: Batch
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Prompts handed to one producer until all their sessions are settled, or the time runs out.

    Attributes:
        lease_id: Unique in the queue; `extend` and `release` take claims too.
        prompts: In the order of issue.
        sessions: Of each prompt, those still to be settled.
        expires_at: Time on the queue's clock after which what is missing is handed out again.
    """

    lease_id: int
    prompts: tuple[Prompt, ...]
    sessions: tuple[tuple[int, ...], ...]
    expires_at: float


AnyLease = TypeVar("AnyLease", Lease, Claim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """A prompt whose sessions are not all settled: issued without result, or issued again.

    Attributes:
        prompt: Which.
        sessions: Indices of the missing sessions.
        age_s: Seconds since it was issued, the last time.
        attempt: 1, and one more each time that it was issued again.
        is_claimed: A producer holds it.
    """

    prompt: Prompt
    sessions: tuple[int, ...]
    age_s: float
    attempt: int
    is_claimed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Where one prompt stands.

    Attributes:
        prompt_uid: Which prompt.
        state: "issued" while sessions are missing, "settled" when all are there, "done" when every task has
            acked, or "dropped".
        sessions_settled: Sessions that gave rows or failed.
        sessions_failed: Reason of each failed session, by its index.
        acked_by: Tasks that have acked.
        reason: Why it was dropped, or issued again.
        attempt: 1, and one more each time that it was issued again.
        num_rows: Rows held.
        num_tokens: Tokens of these rows.
        policy_versions: Oldest and newest policy version of its sampled tokens; None without any.
    """

    prompt_uid: str
    state: PromptState
    sessions_settled: int
    sessions_failed: Mapping[int, str]
    acked_by: frozenset[str]
    reason: str | None
    attempt: int = 1
    num_rows: int = 0
    num_tokens: int = 0
    policy_versions: tuple[int, int] | None = None


class TransferQueue(Protocol):
    """Moves rows from producers to tasks; nothing is lost, nothing is delivered twice at once.

    Every wait has a deadline in seconds, and the DeadlineError says what was waited for. Safe to use from several
    threads.
    """

    def issue(self, prompts: Sequence[Prompt], *, num_sessions: int) -> None:
        """Enter prompts, each to be settled by `num_sessions` sessions.

        Raises:
            DataError: A prompt uid was issued before.
        """
        ...

    def claim(
        self,
        *,
        prompts: int,
        deadline_s: float = DEFAULT_DEADLINE_S,
        claim_s: float = DEFAULT_LEASE_S,
    ) -> Claim:
        """Take up to so many prompts to generate for, in the order of issue; waits for the first.

        A producer that dies loses its claim by time (or at once, where the backend notices), and what it had not yet
        put is handed out again. `put` needs no claim.

        Raises:
            DeadlineError: No prompt was to be had.
        """
        ...

    def put(
        self,
        prompt_uid: str,
        session_index: int,
        trajectories: Sequence[Trajectory],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Settle one session with its trajectories, all or none of them; waits while the queue is full.

        Raises:
            DataError: Unknown prompt or session, or a NaN logprob.
            AlreadySettledError: The session was put or failed before.
            DeadlineError: The queue stayed full.
        """
        ...

    def put_batch(self, batch: Batch, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Settle every session that the batch has rows of, all or none: one segment, however many sessions.

        Args:
            batch: Rows with any known columns; a session's rows must all be in it.
            deadline_s: Longest wait for capacity.

        Raises:
            The same as `put`.
        """
        ...

    def fail(self, prompt_uid: str, session_index: int, *, reason: str) -> None:
        """Settle one session without rows; a prompt whose sessions all fail is dropped."""
        ...

    def drop(self, prompt_uid: str, *, reason: str, reissue: bool = False) -> None:
        """Take a prompt and its rows out, or issue it again; running leases on it become outdated."""
        ...

    def lease(
        self,
        task: str,
        *,
        groups: int | None = None,
        prompts: Sequence[str] | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        lease_s: float = DEFAULT_LEASE_S,
        allow_fewer: bool = False,
    ) -> Lease:
        """Take groups that are ready for a task: so many, or these.

        Args:
            task: Name of a declared task.
            groups: How many groups to wait for.
            prompts: Uids of the groups to take, exactly these and in this order, whatever the task's order is; waits
                until all of them are ready, and for those that another consumer has.
            deadline_s: Longest wait.
            lease_s: How long the groups stay taken.
            allow_fewer: Take what is ready once nothing more can become ready.

        Raises:
            DeadlineError: Not enough became ready.
            NothingToLeaseError: Nothing is ready, and nothing that was issued can become so.
            DataError: A prompt that is named was never issued, is done or dropped, was acked by this task, or is too
                stale, now or while this waits. Nothing is taken then.
        """
        ...

    def extend(self, lease: AnyLease, *, lease_s: float) -> AnyLease:
        """Keep the groups for `lease_s` seconds from now."""
        ...

    def ack(self, lease: Lease, given: Mapping[str, Column] | None = None) -> None:
        """Finish a lease, adding columns aligned with the rows of `lease.batch`.

        Raises:
            OutdatedLeaseError: The lease ran out, was released or was acked.
            DataError: A column that the task does not give, one that is missing, or a NaN logprob.
        """
        ...

    def finish(self, task: str, prompt_uids: Sequence[str]) -> None:
        """Ack groups by name, all or none, that were leased and released before: work that counts later than it reads.

        Raises:
            DataError: The task gives columns, or a prompt was acked by it before, is done or dropped, is leased by a
                consumer of the task, or lacks sessions or columns. Nothing is acked then.
        """
        ...

    def release(self, lease: Lease | Claim) -> None:
        """Give the groups back undone; nothing happens when the lease is outdated."""
        ...

    def set_policy_version(self, version: int) -> None:
        """Say which policy version is published; staleness counts from it. It never falls."""
        ...

    def unsettled(self) -> list[Unsettled]:
        """Prompts that were issued, or issued again, and have no whole result yet, in the order of issue."""
        ...

    def ledger(self) -> list[LedgerEntry]:
        """Where every prompt stands, in issue order."""
        ...

    def forget_finished(self) -> int:
        """Take done and dropped prompts out of the ledger, and say how many."""
        ...

    def stats(self) -> dict[str, float]:
        """Rows, bytes and groups by state, leases, waits, drops by reason."""
        ...

    def close(self) -> None:
        """Wake every waiter with NotReadyError, and free the rows; a journal's directory stays."""
        ...
