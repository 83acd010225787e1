"""What goes into a transfer queue and comes out of it: tasks, options, leases, claims, and the ledger's lines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from rl_core.data.batch import Batch
from rl_core.data.records import Prompt
from rl_core.record_fields import record, settings_record

DEFAULT_DEADLINE_S = 1800.0
DEFAULT_LEASE_S = 3600.0

PromptState = Literal["issued", "settled", "done", "dropped"]


@settings_record
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


@settings_record
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


@record
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


@record
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


@record
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


@record
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
