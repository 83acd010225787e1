"""The transfer queue: producers put sessions, tasks lease whole groups, add columns, and ack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rl_core.batch import Batch, Column
from rl_core.records import Prompt, Trajectory

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
    """

    name: str
    needs: frozenset[str]
    gives: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups handed to one consumer until it acks, releases, or the time runs out.

    Attributes:
        lease_id: Unique in the queue.
        task: Name of the task.
        prompts: The leased prompts, in issue order.
        batch: All rows of these prompts, in the order of prompts, sessions and outputs.
        expires_at: Time on the queue's clock after which the groups are delivered again.
    """

    lease_id: int
    task: str
    prompts: tuple[Prompt, ...]
    batch: Batch
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Where one prompt stands.

    Attributes:
        prompt_uid: Which prompt.
        state: "issued" while sessions are missing, "settled" when all are there, "done" when every task
            has acked, or "dropped".
        sessions_settled: Sessions that gave rows or failed.
        sessions_failed: Reason of each failed session, by its index.
        acked_by: Tasks that have acked.
        reason: Why it was dropped.
    """

    prompt_uid: str
    state: PromptState
    sessions_settled: int
    sessions_failed: Mapping[int, str]
    acked_by: frozenset[str]
    reason: str | None


class TransferQueue(Protocol):
    """Moves rows from producers to tasks; nothing is lost, nothing is delivered twice at once.

    Every wait has a deadline in seconds, and the DeadlineError says what was waited for.
    """

    def issue(self, prompts: Sequence[Prompt], *, num_sessions: int) -> None:
        """Enter prompts, each to be settled by `num_sessions` sessions.

        Raises:
            DataError: A prompt uid was issued before.
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
            DataError: Unknown prompt or session, a session that is settled, or a NaN logprob.
            DeadlineError: The queue stayed full.
        """
        ...

    def fail(self, prompt_uid: str, session_index: int, *, reason: str) -> None:
        """Settle one session without rows; a prompt whose sessions all fail is dropped."""
        ...

    def drop(self, prompt_uid: str, *, reason: str) -> None:
        """Take a prompt and its rows out; running leases on it become outdated."""
        ...

    def lease(
        self,
        task: str,
        *,
        groups: int,
        deadline_s: float = DEFAULT_DEADLINE_S,
        lease_s: float = DEFAULT_LEASE_S,
        allow_fewer: bool = False,
    ) -> Lease:
        """Take whole groups that are ready for a task, in issue order.

        Args:
            task: Name of a declared task.
            groups: How many groups to wait for.
            deadline_s: Longest wait.
            lease_s: How long the groups stay taken.
            allow_fewer: Take what is ready once nothing more can become ready.

        Raises:
            DeadlineError: Not enough groups became ready.
            NothingToLeaseError: Nothing is ready, and nothing that was issued can become so.
        """
        ...

    def extend(self, lease: Lease, *, lease_s: float) -> Lease:
        """Keep the groups for `lease_s` seconds from now."""
        ...

    def ack(self, lease: Lease, given: Mapping[str, Column] | None = None) -> None:
        """Finish a lease, adding columns aligned with the rows of `lease.batch`.

        Raises:
            OutdatedLeaseError: The lease ran out, was released or was acked.
            DataError: A column that the task does not give, one that is missing, or a NaN logprob.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Give the groups back undone; nothing happens when the lease is outdated."""
        ...

    def ledger(self) -> list[LedgerEntry]:
        """Where every prompt stands, in issue order."""
        ...

    def forget_finished(self) -> int:
        """Take done and dropped prompts out of the ledger, and say how many."""
        ...

    def stats(self) -> dict[str, float]:
        """Rows, bytes and groups by state, leases and their ages, drops."""
        ...

    def close(self) -> None:
        """Wake every waiter with NotReadyError, and free the rows."""
        ...
