"""Types of the transfer queue: tasks with their checks, options, leases, claims and ledger entries."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

from annotated_types import Gt, Lt

from rl_core.annotation_rules import expect, several
from rl_core.data.batch import Batch
from rl_core.data.columns import BUILT_IN, column_spec
from rl_core.data.records import Prompt
from rl_core.errors import SettingsError
from rl_core.queue.messages import GENERATE
from rl_core.record_fields import NonNegativeInt, PositiveInt, record, settings_record

DEFAULT_DEADLINE_S = 1800.0
DEFAULT_LEASE_S = 3600.0

Int63 = Annotated[int, Gt(-(1 << 62)), Lt(1 << 62)]
"""A number that messages and the journal can store."""

ROLLOUT_COLUMNS = frozenset(
    {
        "input_ids",
        "loss_mask",
        "rollout_logprobs",
        "policy_versions",
        "reward",
        "reward_baseline",
        "is_truncated",
        "num_prompt_tokens",
        "routed_experts",
        "nucleus_ids",
    }
)
"""Columns that rows have from `put`; `reward` only if every row of the group has one, `routed_experts`, `nucleus_ids`
and `reward_baseline` if any has one."""

PromptState = Literal["issued", "settled", "done", "dropped"]
STATES: tuple[PromptState, ...] = get_args(PromptState)


@settings_record
class TaskSpec:
    """A task that processes rows.

    Attributes:
        name: Name of the task, such as "reference" or "train".
        needs: Columns that rows must have before the task can lease them.
        gives: Columns that the task adds when it acks.
        order: "arrival" delivers groups as they become ready. "issue" delivers them strictly in issue order: a group
            waits for earlier ones, and the same prompts have the same order in every run.
        max_staleness: Maximum number of policy versions by which a group's oldest token may lag behind the queue's;
            staler groups are dropped instead of leased.
    """

    name: str
    needs: frozenset[str]
    gives: frozenset[str] = frozenset()
    order: Literal["arrival", "issue"] = "arrival"
    max_staleness: NonNegativeInt | None = None


@settings_record
class QueueOptions:
    """Options of every backend.

    Attributes:
        capacity_rows: Maximum number of stored rows; above it, `put` waits while some of them can be consumed. `put`
            does not wait if every consumer waits for more groups than are ready.
        capacity_bytes: Maximum size of the stored columns, in bytes; see `capacity_rows`.
        directory: Folder of the journal and the rows, from which the queue can be reopened after a crash; None keeps
            everything in memory. An existing journal is resumed.
    """

    capacity_rows: PositiveInt | None = None
    capacity_bytes: PositiveInt | None = None
    directory: Path | None = None


@record
class Lease:
    """Groups leased to one consumer until it acks or releases them, or the lease expires.

    Attributes:
        lease_id: Unique id within the queue.
        task: Name of the task.
        prompts: The leased prompts, in the task's order.
        batch: All rows of these prompts, ordered by prompt, session and output.
        expires_at: Expiry on the queue's clock; afterwards the groups are delivered again.
    """

    lease_id: int
    task: str
    prompts: tuple[Prompt, ...]
    batch: Batch
    expires_at: float


@record
class Claim:
    """Prompts claimed by one producer until all sessions are settled or the claim expires.

    Attributes:
        lease_id: Unique id within the queue; `extend` and `release` accept claims too.
        prompts: The claimed prompts, in issue order.
        sessions: Unsettled sessions of each prompt.
        expires_at: Expiry on the queue's clock; afterwards missing sessions are handed out again.
    """

    lease_id: int
    prompts: tuple[Prompt, ...]
    sessions: tuple[tuple[int, ...], ...]
    expires_at: float


AnyLease = TypeVar("AnyLease", Lease, Claim)


@record
class Unsettled:
    """A prompt that is not fully settled.

    Attributes:
        prompt: The prompt.
        sessions: Indices of the missing sessions.
        age_s: Seconds since it was last issued.
        attempt: Starts at 1 and increases by one each time the prompt is issued again.
        is_claimed: True if a producer has claimed it.
    """

    prompt: Prompt
    sessions: tuple[int, ...]
    age_s: float
    attempt: int
    is_claimed: bool


@record
class LedgerEntry:
    """The state of one prompt.

    Attributes:
        prompt_uid: uid of the prompt.
        state: "issued" while sessions are missing, "settled" once all are settled, "done" once every task has acked, or
            "dropped".
        sessions_settled: Number of sessions that have rows or failed.
        sessions_failed: Reason for each failed session, by index.
        acked_by: Tasks that have acked.
        reason: Why it was dropped or issued again.
        attempt: Starts at 1 and increases by one each time the prompt is issued again.
        num_rows: Number of stored rows.
        num_tokens: Number of tokens in these rows.
        policy_versions: Oldest and newest policy version of its sampled tokens; None without sampled tokens.
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


def check_tasks(tasks: Sequence[TaskSpec]) -> None:
    """Check tasks for duplicate names and for columns that nothing adds.

    Raises:
        DataError: The value is not a list of tasks, or a task names an unknown column.
        SettingsError: Two tasks share a name, or a task needs a column that neither rollouts nor earlier tasks add.
    """
    names = [task.name for task in several(tasks, TaskSpec, "tasks")]
    if len(set(names)) != len(names):
        raise SettingsError(f"task names must be unique; found {names}.")
    if not names or not all(names):
        raise SettingsError(f"a queue needs at least one task, each with a name; found {names}.")
    if GENERATE in names:
        raise SettingsError(f"{GENERATE!r} is reserved for producers' claims; rename the task.")
    for name in sorted(frozenset().union(*(task.needs | task.gives for task in tasks))):
        column_spec(name)
    own = frozenset().union(*(task.needs - task.gives for task in tasks)) - BUILT_IN  # producers may provide them
    available, waiting = ROLLOUT_COLUMNS | own.difference(*(task.gives for task in tasks)), list(tasks)
    while waiting:
        runnable = [task for task in waiting if task.needs <= available]
        if not runnable:
            lacking = ", ".join(f"{task.name!r} needs {sorted(task.needs - available)}" for task in waiting)
            raise SettingsError(
                f"neither rollouts nor earlier tasks add these columns: {lacking}. Declare a task that adds them."
            )
        available = available.union(*(task.gives for task in runnable))
        waiting = [task for task in waiting if task not in runnable]


def checked_options(tasks: Sequence[TaskSpec], options: QueueOptions | None) -> QueueOptions:
    """Check the tasks, and return the options or the defaults; raises as `check_tasks`."""
    check_tasks(tasks)
    options = QueueOptions() if options is None else options
    expect(options, "options", QueueOptions)
    return options
