"""The transfer queue within one process."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rl_core.batch import Batch, Column, Ragged
from rl_core.errors import (
    DataError,
    DeadlineError,
    NothingToLeaseError,
    NotReadyError,
    OutdatedLeaseError,
    SettingsError,
)
from rl_core.queue.group import QueuedGroup, check_given, check_trajectories, trajectories_size_bytes
from rl_core.queue.index import GroupIndex
from rl_core.queue.interface import DEFAULT_DEADLINE_S, DEFAULT_LEASE_S, Lease, LedgerEntry, TaskSpec
from rl_core.queue.tasks import check_tasks
from rl_core.records import Prompt, Trajectory

SHORTEST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 1.0


class _LeaseRequest(NamedTuple):
    """What one waiting consumer wants."""

    task: TaskSpec
    groups: int
    allow_fewer: bool


class InProcessQueue:
    """A `TransferQueue` in this process; safe to use from several threads."""

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        *,
        capacity_rows: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Declare the tasks.

        Args:
            tasks: Every task that must ack a group before it is done.
            capacity_rows: `put` waits while this many rows are held and some of them can be consumed; it does
                not wait when every consumer waits for more groups than there are.
            clock: Seconds, for leases; tests give their own.

        Raises:
            DataError: A task names an unknown column.
            SettingsError: Two tasks share a name, one needs a column that nothing gives, or capacity_rows is
                below 1.
        """
        check_tasks(tasks)
        self._tasks = {task.name: task for task in tasks}
        self._late_columns = frozenset().union(*(task.gives for task in tasks))
        if capacity_rows is not None and capacity_rows < 1:
            raise SettingsError(f"capacity_rows must be at least 1; found {capacity_rows}.")
        self._capacity_rows = capacity_rows
        self._clock = clock
        self._condition = threading.Condition()
        self._groups = GroupIndex(tasks)
        self._leases: dict[int, Lease] = {}
        self._leased_at: dict[int, float] = {}
        self._waiting_leases: list[_LeaseRequest] = []
        self._num_waiting_puts = 0
        self._lease_ids = itertools.count(1)
        self._drops: Counter[str] = Counter()
        self._last_event = "nothing yet"
        self._is_closed = False

    def issue(self, prompts: Sequence[Prompt], *, num_sessions: int) -> None:
        """See `TransferQueue.issue`."""
        if num_sessions < 1:
            raise DataError(f"num_sessions must be at least 1; found {num_sessions}.")
        with self._condition:
            self._check_open()
            uids = [prompt.uid for prompt in prompts]
            doubled = [uid for uid, count in Counter(uids).items() if count > 1 or uid in self._groups]
            if doubled:
                raise DataError(f"prompt uids must be unique; {doubled[0]!r} was issued before.")
            now = self._clock()
            for prompt in prompts:
                self._groups.add(prompt, num_sessions=num_sessions, issued_at=now)
            self._note(f"issue of {len(prompts)} prompts", wakes=False)

    def put(
        self,
        prompt_uid: str,
        session_index: int,
        trajectories: Sequence[Trajectory],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """See `TransferQueue.put`."""
        check_trajectories(prompt_uid, session_index, trajectories)
        rows = tuple(sorted(trajectories, key=lambda trajectory: trajectory.output_index))
        with self._condition:
            self._open_group(prompt_uid).check_session(session_index)
            self._wait_for_room(len(rows), deadline_s)
            group = self._open_group(prompt_uid)
            group.check_session(session_index)
            group.sessions[session_index] = rows
            group.num_rows += len(rows)
            group.size_bytes += trajectories_size_bytes(rows)
            self._settle(group)
            self._note(f"put of session {session_index} of prompt {prompt_uid!r}", wakes=group.state != "issued")

    def fail(self, prompt_uid: str, session_index: int, *, reason: str) -> None:
        """See `TransferQueue.fail`."""
        with self._condition:
            group = self._open_group(prompt_uid)
            group.check_session(session_index)
            group.failures[session_index] = reason
            self._settle(group)
            self._note(f"failed session {session_index} of prompt {prompt_uid!r}", wakes=group.state != "issued")

    def drop(self, prompt_uid: str, *, reason: str) -> None:
        """See `TransferQueue.drop`."""
        with self._condition:
            group = self._open_group(prompt_uid)
            for lease_id in set(group.leased_by.values()):
                self._end_lease(lease_id)
            group.drop(reason)
            self._groups.refresh(group)
            self._drops[reason] += 1
            self._note(f"drop of prompt {prompt_uid!r}")

    def lease(
        self,
        task: str,
        *,
        groups: int,
        deadline_s: float = DEFAULT_DEADLINE_S,
        lease_s: float = DEFAULT_LEASE_S,
        allow_fewer: bool = False,
    ) -> Lease:
        """See `TransferQueue.lease`."""
        spec = self._task(task)
        if groups < 1:
            raise DataError(f"groups must be at least 1; found {groups}.")
        request = _LeaseRequest(spec, groups, allow_fewer)
        with self._condition:
            self._wait_for_groups(request, deadline_s)
            ready = self._groups.first_ready(spec, groups)
            if not ready:
                raise NothingToLeaseError(
                    f"task {task!r} asked for {groups} groups, but nothing that was issued can become ready for it: "
                    f"{self._groups.describe_states()}."
                )
            now = self._clock()
            lease = Lease(
                lease_id=next(self._lease_ids),
                task=task,
                prompts=tuple(group.prompt for group in ready),
                batch=self._rows_for(spec, ready),
                expires_at=now + lease_s,
            )
            self._leases[lease.lease_id], self._leased_at[lease.lease_id] = lease, now
            for group in ready:
                group.leased_by[task] = lease.lease_id
                self._groups.refresh(group)
            self._note(f"lease {lease.lease_id} of {len(ready)} groups for task {task!r}", wakes=False)
            return lease

    def extend(self, lease: Lease, *, lease_s: float) -> Lease:
        """See `TransferQueue.extend`."""
        with self._condition:
            extended = replace(self._current(lease), expires_at=self._clock() + lease_s)
            self._leases[lease.lease_id] = extended
            self._note(f"lease {lease.lease_id} extended")
            return extended

    def ack(self, lease: Lease, given: Mapping[str, Column] | None = None) -> None:
        """See `TransferQueue.ack`."""
        given = given or {}
        task = self._task(lease.task)
        with self._condition:
            self._current(lease)
            check_given(task, given)
            updated = lease.batch.with_columns(given)
            self._end_lease(lease.lease_id)
            start = 0
            for group in self._groups_of(lease):
                rows = range(start, start + group.num_rows)
                start = rows.stop
                group.ack(task.name, {name: _rows_of(updated[name], rows) for name in given})
                if group.acked_by >= self._tasks.keys():
                    group.finish()
                self._groups.refresh(group)
            self._note(f"ack of lease {lease.lease_id} by task {task.name!r}")

    def release(self, lease: Lease) -> None:
        """See `TransferQueue.release`."""
        with self._condition:
            if lease.lease_id in self._leases:
                self._end_lease(lease.lease_id)
                self._note(f"release of lease {lease.lease_id}")

    def ledger(self) -> list[LedgerEntry]:
        """See `TransferQueue.ledger`."""
        with self._condition:
            return [group.entry() for group in self._groups]

    def forget_finished(self) -> int:
        """See `TransferQueue.forget_finished`."""
        with self._condition:
            return self._groups.remove_finished()

    def stats(self) -> dict[str, float]:
        """See `TransferQueue.stats`."""
        with self._condition:
            self._expire()
            now = self._clock()
            stats: dict[str, float] = {f"groups/{state}": count for state, count in self._groups.states().items()}
            stats["rows"] = self._groups.num_rows
            stats["size_bytes"] = self._groups.size_bytes
            stats["leases"] = len(self._leases)
            stats["oldest_lease_s"] = now - min(self._leased_at.values(), default=now)
            stats["oldest_issued_s"] = now - min(
                (g.issued_at for g in self._groups if g.state == "issued"), default=now
            )
            stats["waiting/put"] = self._num_waiting_puts
            stats["waiting/lease"] = len(self._waiting_leases)
            stats.update({f"drops/{reason}": count for reason, count in sorted(self._drops.items())})
            return {name: float(value) for name, value in stats.items()}

    def close(self) -> None:
        """See `TransferQueue.close`."""
        with self._condition:
            self._is_closed = True
            self._groups = GroupIndex(tuple(self._tasks.values()))
            self._leases.clear()
            self._leased_at.clear()
            self._condition.notify_all()

    def _wait_for_room(self, num_rows: int, deadline_s: float) -> None:
        def describe() -> str:
            held = f"{self._groups.num_rows} of {self._capacity_rows} held"
            return f"put of {num_rows} rows waited for room: {held}, {self._groups.describe_states()}"

        self._num_waiting_puts += 1
        try:
            self._wait(lambda: self._has_room(num_rows), deadline_s, describe)
        finally:
            self._num_waiting_puts -= 1

    def _wait_for_groups(self, request: _LeaseRequest, deadline_s: float) -> None:
        task = request.task
        self._waiting_leases.append(request)
        if self._num_waiting_puts:
            self._condition.notify_all()  # a consumer that waits for more than there is lets producers go on
        try:
            self._wait(
                lambda: self._can_lease(request),
                deadline_s,
                lambda: (
                    f"lease of {request.groups} groups for task {task.name!r} waited: "
                    f"{self._groups.describe_wait(task, now=self._clock())}"
                ),
            )
        finally:
            self._waiting_leases.remove(request)

    def _wait(self, is_true: Callable[[], bool], deadline_s: float, describe: Callable[[], str]) -> None:
        """Wait on the condition, waking also when a lease runs out.

        Deadlines run in real time. A clock that tests give stands still while this waits, so each wake that finds
        the lease still running makes the next pause twice as long.
        """
        ends_at = time.monotonic() + deadline_s
        pause_s = SHORTEST_PAUSE_S
        while True:
            self._check_open()
            self._expire()
            if is_true():
                return
            remaining_s = ends_at - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineError(f"{describe()}, for {deadline_s:g} s; the queue's last event: {self._last_event}.")
            next_expiry = min((lease.expires_at for lease in self._leases.values()), default=float("inf"))
            until_expiry_s = max(next_expiry - self._clock(), pause_s)
            was_notified = self._condition.wait(min(remaining_s, until_expiry_s, threading.TIMEOUT_MAX))
            if not was_notified and self._clock() < next_expiry:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _expire(self) -> None:
        now = self._clock()
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_at <= now]:
            self._end_lease(lease_id)
            self._note(f"lease {lease_id} ran out")

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        del self._leased_at[lease_id]
        for group in self._groups_of(lease):
            group.leased_by.pop(lease.task, None)
            self._groups.refresh(group)

    def _groups_of(self, lease: Lease) -> Iterator[QueuedGroup]:
        groups = (self._groups.get(prompt.uid) for prompt in lease.prompts)
        return (group for group in groups if group is not None)

    def _settle(self, group: QueuedGroup) -> None:
        group.settle()
        self._groups.refresh(group)
        if group.state == "dropped":
            self._drops[group.reason or ""] += 1

    def _can_lease(self, request: _LeaseRequest) -> bool:
        num_ready = self._groups.num_ready(request.task)
        num_possible = self._groups.num_possible(request.task)
        is_all = request.allow_fewer and num_ready == num_possible
        return num_ready >= request.groups or num_possible == 0 or is_all

    def _has_room(self, num_rows: int) -> bool:
        if self._capacity_rows is None or self._groups.num_rows + num_rows <= self._capacity_rows:
            return True
        if self._groups.num_in("settled") == 0:
            return True
        is_worked_on = self._leases or any(self._can_lease(request) for request in self._waiting_leases)
        return bool(self._waiting_leases) and not is_worked_on

    def _rows_for(self, task: TaskSpec, groups: Sequence[QueuedGroup]) -> Batch:
        """Rows of groups, with the columns from rollouts and those that the task needs.

        Groups may differ in the late columns that other tasks have given so far, which this task did not ask for.
        """
        batches = [group.batch for group in groups if group.batch is not None]
        common = frozenset.intersection(*(batch.names for batch in batches))
        names = {name for name in common if name in task.needs or name not in self._late_columns}
        return Batch.concat([batch.only(names) for batch in batches])

    def _open_group(self, prompt_uid: str) -> QueuedGroup:
        self._check_open()
        group = self._groups.get(prompt_uid)
        if group is None:
            raise DataError(f"prompt {prompt_uid!r} was never issued, or is forgotten; issue it first.")
        if group.state in ("done", "dropped"):
            why = f" ({group.reason})" if group.reason else ""
            raise DataError(f"prompt {prompt_uid!r} is {group.state}{why}; nothing more can be done with it.")
        return group

    def _current(self, lease: Lease) -> Lease:
        self._check_open()
        self._expire()
        current = self._leases.get(lease.lease_id)
        if current is None:
            raise OutdatedLeaseError(
                f"lease {lease.lease_id} of task {lease.task!r} ran out, was released or was acked; its groups are "
                "delivered again, so drop this result. Ask for a longer lease_s, or extend it in time."
            )
        return current

    def _task(self, name: str) -> TaskSpec:
        try:
            return self._tasks[name]
        except KeyError:
            raise DataError(f"unknown task {name!r}; declared tasks: {sorted(self._tasks)}.") from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReadyError("the transfer queue is closed.")

    def _note(self, event: str, *, wakes: bool = True) -> None:
        """Remember an event; wake the waiters unless it cannot be what any of them waits for."""
        self._last_event = f"{event}, at {time.strftime('%H:%M:%S')}"
        if wakes:
            self._condition.notify_all()


def _rows_of(column: Column, rows: range) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    return column[rows.start : rows.stop]
