"""The transfer queue within one process."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

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
from rl_core.queue.interface import DEFAULT_DEADLINE_S, DEFAULT_LEASE_S, Lease, LedgerEntry, TaskSpec
from rl_core.records import Prompt, Trajectory


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
            capacity_rows: `put` waits while this many rows are held and some of them can be consumed.
            clock: Seconds, for leases; tests give their own.

        Raises:
            SettingsError: Two tasks share a name, or capacity_rows is below 1.
        """
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) != len(tasks):
            raise SettingsError(f"each task needs a name of its own; found {[task.name for task in tasks]}.")
        if capacity_rows is not None and capacity_rows < 1:
            raise SettingsError(f"capacity_rows must be at least 1; found {capacity_rows}.")
        self._capacity_rows = capacity_rows
        self._clock = clock
        self._condition = threading.Condition()
        self._groups: dict[str, QueuedGroup] = {}
        self._leases: dict[int, Lease] = {}
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
                self._groups[prompt.uid] = QueuedGroup(prompt=prompt, num_sessions=num_sessions, issued_at=now)
            self._note(f"issue of {len(prompts)} prompts")

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
            self._wait(
                lambda: self._has_room(len(rows)),
                deadline_s,
                lambda: f"put of {len(rows)} rows waited for room: {self._num_rows()} of {self._capacity_rows} held",
            )
            group = self._open_group(prompt_uid)
            group.check_session(session_index)
            group.sessions[session_index] = rows
            group.num_rows += len(rows)
            group.size_bytes += trajectories_size_bytes(rows)
            self._settle(group)
            self._note(f"put of session {session_index} of prompt {prompt_uid!r}")

    def fail(self, prompt_uid: str, session_index: int, *, reason: str) -> None:
        """See `TransferQueue.fail`."""
        with self._condition:
            group = self._open_group(prompt_uid)
            group.check_session(session_index)
            group.failures[session_index] = reason
            self._settle(group)
            self._note(f"failed session {session_index} of prompt {prompt_uid!r}")

    def drop(self, prompt_uid: str, *, reason: str) -> None:
        """See `TransferQueue.drop`."""
        with self._condition:
            group = self._open_group(prompt_uid)
            for lease_id in set(group.leased_by.values()):
                self._end_lease(lease_id)
            group.drop(reason)
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
        with self._condition:
            self._wait(
                lambda: self._can_lease(spec, groups, allow_fewer=allow_fewer),
                deadline_s,
                lambda: f"lease of {groups} groups for task {task!r} waited: {self._describe_wait(spec)}",
            )
            ready = self._ready(spec)[:groups]
            if not ready:
                raise NothingToLeaseError(
                    f"task {task!r} asked for {groups} groups, but nothing that was issued can become ready for it: "
                    f"{self._count_states()}."
                )
            lease = Lease(
                lease_id=next(self._lease_ids),
                task=task,
                prompts=tuple(group.prompt for group in ready),
                batch=Batch.concat([group.batch for group in ready if group.batch is not None]),
                expires_at=self._clock() + lease_s,
            )
            self._leases[lease.lease_id] = lease
            for group in ready:
                group.leased_by[task] = lease.lease_id
            self._note(f"lease {lease.lease_id} of {len(ready)} groups for task {task!r}")
            return lease

    def extend(self, lease: Lease, *, lease_s: float) -> Lease:
        """See `TransferQueue.extend`."""
        with self._condition:
            current = self._current(lease)
            extended = Lease(
                lease_id=current.lease_id,
                task=current.task,
                prompts=current.prompts,
                batch=current.batch,
                expires_at=self._clock() + lease_s,
            )
            self._leases[lease.lease_id] = extended
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
            for prompt in lease.prompts:
                group = self._groups[prompt.uid]
                if group.batch is None:
                    continue
                rows = range(start, start + len(group.batch))
                start += len(group.batch)
                if given:
                    group.batch = group.batch.with_columns(
                        {name: _rows_of(updated[name], rows) for name in given},
                    )
                group.acked_by.add(task.name)
                if group.acked_by >= self._tasks.keys():
                    group.state = "done"
                    group.free()
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
            return [group.entry() for group in self._groups.values()]

    def forget_finished(self) -> int:
        """See `TransferQueue.forget_finished`."""
        with self._condition:
            finished = [uid for uid, group in self._groups.items() if group.state in ("done", "dropped")]
            for uid in finished:
                del self._groups[uid]
            return len(finished)

    def stats(self) -> dict[str, float]:
        """See `TransferQueue.stats`."""
        with self._condition:
            self._expire()
            now = self._clock()
            states = Counter(group.state for group in self._groups.values())
            stats: dict[str, float] = {f"groups/{state}": float(count) for state, count in sorted(states.items())}
            stats["rows"] = float(self._num_rows())
            stats["size_bytes"] = float(sum(group.size_bytes for group in self._groups.values()))
            stats["leases"] = float(len(self._leases))
            waiting = [now - group.issued_at for group in self._groups.values() if group.state == "issued"]
            stats["oldest_issued_s"] = max(waiting, default=0.0)
            stats.update({f"drops/{reason}": float(count) for reason, count in sorted(self._drops.items())})
            return stats

    def close(self) -> None:
        """See `TransferQueue.close`."""
        with self._condition:
            self._is_closed = True
            self._groups.clear()
            self._leases.clear()
            self._condition.notify_all()

    def _wait(self, is_true: Callable[[], bool], deadline_s: float, describe: Callable[[], str]) -> None:
        """Wait on the condition, waking also when a lease runs out."""
        ends_at = time.monotonic() + deadline_s
        while True:
            self._check_open()
            self._expire()
            if is_true():
                return
            remaining = ends_at - time.monotonic()
            if remaining <= 0:
                raise DeadlineError(f"{describe()}, for {deadline_s:g} s; the queue's last event: {self._last_event}.")
            next_expiry = min((lease.expires_at for lease in self._leases.values()), default=float("inf"))
            self._condition.wait(max(0.0, min(remaining, next_expiry - self._clock())))

    def _expire(self) -> None:
        now = self._clock()
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_at <= now]:
            self._end_lease(lease_id)
            self._note(f"lease {lease_id} ran out")

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        for prompt in lease.prompts:
            group = self._groups.get(prompt.uid)
            if group is not None:
                group.leased_by.pop(lease.task, None)

    def _settle(self, group: QueuedGroup) -> None:
        group.settle()
        if group.state == "dropped":
            self._drops[group.reason or ""] += 1

    def _can_lease(self, task: TaskSpec, groups: int, *, allow_fewer: bool) -> bool:
        num_ready = len(self._ready(task))
        if num_ready >= groups:
            return True
        num_possible = sum(group.may_become_ready_for(task) for group in self._groups.values())
        return num_possible == 0 or (allow_fewer and num_ready == num_possible)

    def _ready(self, task: TaskSpec) -> list[QueuedGroup]:
        return [group for group in self._groups.values() if group.is_ready_for(task)]

    def _has_room(self, num_rows: int) -> bool:
        if self._capacity_rows is None or self._num_rows() + num_rows <= self._capacity_rows:
            return True
        return not any(group.state == "settled" for group in self._groups.values())

    def _num_rows(self) -> int:
        return sum(group.num_rows for group in self._groups.values())

    def _describe_wait(self, task: TaskSpec) -> str:
        parts = [f"{len(self._ready(task))} ready", self._count_states()]
        waiting = [group for group in self._groups.values() if group.state == "issued"]
        if waiting:
            first = waiting[0]
            parts.append(
                f"prompt {first.prompt.uid!r} lacks sessions {first.missing_sessions} since "
                f"{self._clock() - first.issued_at:.1f} s"
            )
        lacking = [
            task.needs - group.batch.names
            for group in self._groups.values()
            if group.batch is not None and not task.needs <= group.batch.names
        ]
        if lacking:
            parts.append(f"{len(lacking)} groups lack columns {sorted(frozenset().union(*lacking))}")
        return ", ".join(parts)

    def _count_states(self) -> str:
        counts = Counter(group.state for group in self._groups.values())
        return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "nothing issued"

    def _open_group(self, prompt_uid: str) -> QueuedGroup:
        self._check_open()
        group = self._groups.get(prompt_uid)
        if group is None or group.state in ("done", "dropped"):
            state = "was never issued" if group is None else f"is {group.state}"
            raise DataError(f"prompt {prompt_uid!r} {state}; issue it before its sessions are put.")
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

    def _note(self, event: str) -> None:
        self._last_event = f"{event}, at {time.strftime('%H:%M:%S')}"
        self._condition.notify_all()


def _rows_of(column: Column, rows: range) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    return column[rows.start : rows.stop]
