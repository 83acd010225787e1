"""One prompt's way through a queue: its sessions, its rows, and who has acked them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_core.batch import Batch, Column, Ragged
from rl_core.errors import DataError
from rl_core.queue.interface import LedgerEntry, PromptState, TaskSpec
from rl_core.records import Prompt, Trajectory


@dataclass(slots=True, kw_only=True)
class QueuedGroup:
    """The mutable record that a queue keeps for each prompt; `order` counts prompts as they were issued."""

    prompt: Prompt
    order: int
    num_sessions: int
    issued_at: float
    sessions: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    batch: Batch | None = None
    acked_by: set[str] = field(default_factory=set)
    leased_by: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    size_bytes: int = 0
    state: PromptState = "issued"
    reason: str | None = None

    @property
    def missing_sessions(self) -> list[int]:
        """Sessions that neither gave rows nor failed."""
        return [i for i in range(self.num_sessions) if i not in self.sessions and i not in self.failures]

    def check_session(self, session_index: int) -> None:
        """Refuse a session that was not asked for, or that is settled."""
        uid = self.prompt.uid
        if not 0 <= session_index < self.num_sessions:
            raise DataError(f"prompt {uid!r} has sessions 0 to {self.num_sessions - 1}; found session {session_index}.")
        if session_index in self.sessions or session_index in self.failures:
            raise DataError(f"session {session_index} of prompt {uid!r} is already settled; put it only once.")

    def settle(self) -> None:
        """Join the rows once every session is settled, or drop a prompt without any.

        Rows that lack a reward get no `reward` column, so that a task which needs it waits for the task which gives it.
        """
        if len(self.sessions) + len(self.failures) < self.num_sessions:
            return
        rows = [t for index in sorted(self.sessions) for t in self.sessions[index]]
        if rows:
            batch = Batch.from_trajectories(rows)
            is_scored = all(row.reward is not None for row in rows)
            self.hold(batch if is_scored else batch.only(batch.names - {"reward"}))
            self.sessions = dict.fromkeys(self.sessions, ())
            self.state = "settled"
        else:
            reasons = "; ".join(sorted(set(self.failures.values()))) or "its sessions gave no trajectory"
            self.drop(f"no rows: {reasons}")

    def hold(self, batch: Batch) -> None:
        """Keep these rows in place of what was held."""
        self.batch, self.num_rows, self.size_bytes = batch, len(batch), batch.size_bytes

    def drop(self, reason: str) -> None:
        """Take the rows out, for this reason."""
        self.state, self.reason = "dropped", reason
        self.free()

    def ack(self, task_name: str, given: Mapping[str, Column]) -> None:
        """Note that a task is done with the rows, and add the columns that it gives."""
        if self.batch is not None and given:
            self.hold(self.batch.with_columns(given))
        self.acked_by.add(task_name)

    def finish(self) -> None:
        """Free the rows of a group that every task has acked."""
        self.state = "done"
        self.free()

    def free(self) -> None:
        """Let go of the rows."""
        self.batch = None
        self.sessions = dict.fromkeys(self.sessions, ())
        self.leased_by.clear()
        self.num_rows = self.size_bytes = 0

    def is_ready_for(self, task: TaskSpec) -> bool:
        """True when the task may lease this group now."""
        if self.batch is None or task.name in self.acked_by or task.name in self.leased_by:
            return False
        return task.needs <= self.batch.names

    def may_become_ready_for(self, task: TaskSpec) -> bool:
        """True while the group can still be leased by the task, now or later."""
        return self.state in ("issued", "settled") and task.name not in self.acked_by

    def entry(self) -> LedgerEntry:
        """The ledger's line."""
        return LedgerEntry(
            prompt_uid=self.prompt.uid,
            state=self.state,
            sessions_settled=len(self.sessions) + len(self.failures),
            sessions_failed=dict(self.failures),
            acked_by=frozenset(self.acked_by),
            reason=self.reason,
        )


def trajectories_size_bytes(trajectories: Sequence[Trajectory]) -> int:
    """Bytes of the token arrays."""
    return sum(
        t.input_ids.nbytes + t.loss_mask.nbytes + t.rollout_logprobs.nbytes + t.policy_versions.nbytes
        for t in trajectories
    )


def check_trajectories(prompt_uid: str, session_index: int, trajectories: Sequence[Trajectory]) -> None:
    """Refuse rows of another session, doubled output indices, and logprobs that are not finite."""
    for row, trajectory in enumerate(trajectories):
        if (trajectory.prompt_uid, trajectory.session_index) != (prompt_uid, session_index):
            raise DataError(
                f"trajectory {row} put for session {session_index} of prompt {prompt_uid!r} says that it belongs to "
                f"session {trajectory.session_index} of prompt {trajectory.prompt_uid!r}."
            )
        name = f"prompt {prompt_uid!r}, session {session_index}, output {trajectory.output_index}"
        is_finite = np.isfinite(trajectory.rollout_logprobs)
        if not is_finite.all():
            raise DataError(f"rollout_logprobs of {name} are not finite at token {int(np.argmin(is_finite))}.")
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise DataError(
                f"the reward of {name} must be a finite number, or None while it is not yet scored; found "
                f"{trajectory.reward}. Fail the session where its reward could not be computed."
            )
    indices = [trajectory.output_index for trajectory in trajectories]
    if len(set(indices)) != len(indices):
        raise DataError(f"session {session_index} of prompt {prompt_uid!r} gives an output index twice: {indices}.")


def check_given(task: TaskSpec, given: Mapping[str, Column]) -> None:
    """Refuse columns that a task does not give, lacks, or that are not finite."""
    if given.keys() != task.gives:
        raise DataError(f"task {task.name!r} gives {sorted(task.gives)}; found {sorted(given)}.")
    for name, column in given.items():
        values = column.values if isinstance(column, Ragged) else column
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            raise DataError(f"column {name!r} given by task {task.name!r} has values that are not finite.")
