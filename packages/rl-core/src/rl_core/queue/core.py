"""The queue's state machine, without waiting, I/O or payloads; time is an argument."""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import AlreadySettledError, DataError, OutdatedLeaseError
from rl_core.queue.group import MAX_SESSIONS, LatePart, Part, QueuedGroup
from rl_core.queue.index import SPARE_ENTRIES, GroupIndex
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.messages import GENERATE, Ack, Finish, LeaseRequest, Put
from rl_core.queue.picking import Blocked, finished_groups, pick_named, pick_next
from rl_core.queue.segment_table import SegmentTable


@dataclass(slots=True, eq=False)
class RunningLease:
    """A lease or claim that has not ended."""

    lease_id: int
    task: TaskSpec
    groups: list[QueuedGroup]
    leased_at: float
    expires_at: float
    client: str


class QueueCore:
    """Groups, leases and segments of one queue.

    `dirty` has the groups that changed since the journal last wrote them, `forgotten` those to delete from it.
    """

    def __init__(self, tasks: Sequence[TaskSpec], options: QueueOptions) -> None:
        """Start empty."""
        self.options = options
        self.specs = {task.name: task for task in tasks}
        self.groups = GroupIndex(tasks)
        self.leases: dict[int, RunningLease] = {}
        self.segments = SegmentTable()
        self.policy_version = 0
        self.drops: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.ended: dict[int, str] = {}
        self.dirty: dict[str, QueuedGroup] = {}
        self.forgotten: list[int] = []
        self.first_lease = 1
        self.lease_ids = itertools.count(self.first_lease)
        self.num_changes = 0
        self._expiries: list[tuple[float, int]] = []

    # -- prompts and sessions

    def issue(self, prompts: Sequence[tuple[str, Any]], *, num_sessions: int, now: float) -> None:
        """Add prompts atomically."""
        if not 1 <= num_sessions <= MAX_SESSIONS:
            raise DataError(f"num_sessions must be from 1 to {MAX_SESSIONS}; found {num_sessions}.")
        counts = Counter(uid for uid, _ in prompts)
        doubled = [uid for uid in counts if counts[uid] > 1 or uid in self.groups]
        if doubled:
            raise DataError(f"prompt uids must be unique; {doubled[0]!r} was already issued.")
        for uid, prompt in prompts:
            group = QueuedGroup(
                uid=uid,
                order=next(self.groups.orders),
                num_sessions=num_sessions,
                prompt=prompt,
                issued_at=now,
            )
            self.groups.add(group)
            self.dirty[uid] = group

    def check_sessions(self, sessions: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Raise an error for sessions that are unknown or already settled; sessions are grouped by prompt."""
        if len({uid for uid, _ in sessions}) != len(sessions):
            raise DataError("a put must name each prompt once; one is named twice.")
        for uid, indices in sessions:
            group = self.groups.find_open(uid)
            if len(set(indices)) != len(indices) or not indices:
                raise DataError(f"a put must settle each session of prompt {uid!r} once; found {indices}.")
            for index in indices:
                if not 0 <= index < group.num_sessions:
                    raise DataError(
                        f"prompt {uid!r} has sessions 0 to {group.num_sessions - 1}; found session {index}."
                    )
                if index in group.settled or index in group.failures:
                    why = f" ({group.failures[index]})" if index in group.failures else ""
                    raise AlreadySettledError(
                        f"session {index} of prompt {uid!r} is already settled{why}. Put each session once."
                    )

    def was_put(self, put_id: str, sessions: Sequence[tuple[str, Sequence[int]]]) -> bool:
        """Return True if this put was already applied and only its answer was lost."""
        for uid, indices in sessions:
            group = self.groups.get(uid)
            if group is None or any(group.settled.get(index) != put_id for index in indices):
                return False
        return True

    def put(self, put: Put) -> None:
        """Add written rows of checked sessions, atomically."""
        uids = {uid for uid, _ in put.sessions}
        for part in put.parts:
            if part.prompt_uid not in uids or part.num_rows < 1 or part.first < 0:
                raise DataError(f"a put has rows of prompt {part.prompt_uid!r} but settles no session of it.")
        groups = {uid: self.groups.find_open(uid) for uid, _ in put.sessions}
        for uid, indices in put.sessions:
            groups[uid].settled |= dict.fromkeys(indices, put.put_id)
        if put.parts:
            segment, columns = self.segments.add(put.place), frozenset(put.columns)
            for part in put.parts:
                numbers = part.first, part.num_rows, part.num_tokens, part.size_bytes, part.oldest, part.newest
                groups[part.prompt_uid].add_part(Part(segment, *numbers, columns))
                self.segments.need(segment)
        for group in groups.values():
            self._settle(group)

    def fail(self, uid: str, index: int, reason: str) -> None:
        """Settle a session without rows."""
        self.check_sessions([(uid, [index])])
        group = self.groups.find_open(uid)
        group.failures[index] = reason
        self._settle(group)

    def drop(self, group: QueuedGroup, reason: str, *, reissue: bool, now: float) -> None:
        """Remove a group, or issue it again; running leases on it end."""
        for name, lease_id in list(group.leased.items()):
            if name == GENERATE:
                self._leave_claim(group, lease_id)
            elif lease_id in self.leases:
                self.end_lease(lease_id, f"prompt {group.uid!r} was dropped: {reason}")
        self.drops[reason.partition(": ")[0]] += 1
        self._free_rows(group)
        group.reason = reason
        if reissue:
            self.counts["reissued"] += 1
            group.state, group.attempt, group.issued_at = "issued", group.attempt + 1, now
            group.settled, group.failures = {}, {}
            group.acked = {name: lease for name, lease in group.acked.items() if not self.specs[name].gives}
        else:
            group.state = "dropped"
        self._changed(group)

    def forget_finished(self) -> int:
        """Remove done and dropped prompts."""
        finished = self.groups.remove_finished()
        for group in finished:
            self.dirty.pop(group.uid, None)
        self.forgotten += [group.order for group in finished]
        return len(finished)

    # -- leases

    def try_lease(self, request: LeaseRequest, *, now: float, client: str, blocked: Blocked) -> RunningLease | None:
        """Grant a lease request; None while its groups are not ready.

        Args:
            request: The lease request.
            now: Time on the queue's clock, in seconds.
            client: The requesting client.
            blocked: The reason that blocked this request at its last attempt.

        Raises:
            DataError: The request names a prompt that can never become ready.
        """
        task = self.groups.task_of(request)
        if blocked.is_still(task, policy_version=self.policy_version):
            return None

        def drop_stale(group: QueuedGroup) -> bool:
            if not self._is_stale(group, task.spec):
                return False
            self.drop(group, "stale", reissue=False, now=now)
            return True

        pick = pick_named if request.prompts else pick_next
        picked = pick(self.groups, request, drop_stale=drop_stale)
        if picked is None:
            if request.prompts:
                blocked.note(self.groups, request, policy_version=self.policy_version)
            return None
        lease = RunningLease(next(self.lease_ids), task.spec, picked, now, now + request.lease_s, client)
        self.leases[lease.lease_id] = lease
        self._note_expiry(lease)
        for group in picked:
            group.leased[request.task] = lease.lease_id
            self.groups.refresh(group)
        return lease

    def current(self, lease_id: int, task: str) -> RunningLease:
        """Return a lease that has not ended."""
        lease = self.leases.get(lease_id)
        if lease is None and lease_id < self.first_lease:
            raise OutdatedLeaseError(
                f"lease {lease_id} of task {task!r} is outdated: the queue was reopened since. Its groups are "
                "delivered again or are done. Discard this result and lease again."
            )
        if lease is None:
            how = self.ended.get(lease_id, "expired, was released or was acked")
            advice = (
                "No action is needed."
                if how == "was acked"
                else "Its groups are delivered again or are done. Discard this result, and request a longer lease_s or "
                "extend the lease in time."
            )
            raise OutdatedLeaseError(f"lease {lease_id} of task {task!r} is outdated: it {how}. {advice}")
        return lease

    def extend(self, lease: RunningLease, *, expires_at: float) -> None:
        """Change the expiry of a lease."""
        lease.expires_at = expires_at
        self._note_expiry(lease)

    def ack(self, ack: Ack) -> None:
        """Finish a lease, with the columns that it adds."""
        lease = self.current(ack.lease_id, ack.task)
        if frozenset(ack.columns) != lease.task.gives:
            raise DataError(
                f"task {ack.task!r} must add exactly the columns {sorted(lease.task.gives)}; found "
                f"{sorted(ack.columns)}."
            )
        self.leases.pop(lease.lease_id)
        self._note_end(lease.lease_id, "was acked")
        self.counts[f"acks/{ack.task}"] += len(lease.groups)
        num_rows = sum(group.num_rows for group in lease.groups)
        segment = self.segments.add(ack.place) if ack.columns else 0
        if ack.columns:
            # Keep it until each group has its part: the first group may be done and free it earlier.
            self.segments.need(segment)
        first = 0
        for group in lease.groups:
            rows = group.num_rows
            if ack.columns:
                size = ack.size_bytes * rows // max(num_rows, 1)
                group.add_late(LatePart(segment, first, rows, size, ack.task, lease.task.gives))
                self.segments.need(segment)
            first += rows
            group.leased.pop(ack.task, None)
            self._count_ack(group, ack.task, lease.lease_id)
        if ack.columns:
            self.segments.release(segment)

    def finish(self, finish: Finish) -> None:
        """Ack groups that are not leased, atomically.

        Raises:
            DataError: The task adds columns, or a group cannot be acked now.
        """
        groups = finished_groups(self.groups, finish)
        self._note_end(finish.number, "was acked")
        self.counts[f"acks/{finish.task}"] += len(groups)
        for group in groups:
            self._count_ack(group, finish.task, finish.number)

    def was_acked(self, lease_id: int) -> bool:
        """Return True if this ack or finish was already applied and only its answer was lost."""
        return self.ended.get(lease_id) == "was acked" or any(lease_id in g.acked.values() for g in self.groups)

    def end_lease(self, lease_id: int, how: str) -> None:
        """Return the groups of a lease."""
        lease = self.leases.pop(lease_id)
        self._note_end(lease_id, how)
        for group in lease.groups:
            group.leased.pop(lease.task.name, None)
            self.groups.refresh(group)

    def expire(self, *, now: float) -> list[int]:
        """End expired leases, and return them."""
        ended = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.expires_at <= now:
                self.end_lease(lease_id, "expired")
                self.counts["leases_expired"] += 1
                ended.append(lease_id)
        return ended

    def next_expiry(self) -> float:
        """Return the earliest time at which a lease may expire; infinity without leases."""
        return self._expiries[0][0] if self._expiries else float("inf")

    # -- segments

    def lost(self, segment_id: int, reason: str, *, now: float) -> int:
        """Issue the prompts of an unreadable segment again, and return their number."""
        groups = [group for group in self.groups if segment_id in group.segments()]
        for group in groups:
            if any(part.segment == segment_id for part in group.parts):
                self.drop(group, f"lost: {reason}", reissue=True, now=now)
            else:
                self._lose_late(group, segment_id)
        return len(groups)

    def drop_client(self, client: str) -> None:
        """Release all leases of a dead client."""
        for lease_id in [i for i, lease in self.leases.items() if lease.client == client]:
            self.end_lease(lease_id, "was released because its process ended")
        self.segments.unpin_all(client)

    def restore(
        self, groups: Iterable[QueuedGroup], places: Mapping[int, Any], pins: Mapping[int, Counter[str]]
    ) -> None:
        """Restore the state of a journal."""
        self.segments.restore(places, pins)
        last = -1
        for group in groups:
            for number in group.segments():
                self.segments.need(number)
            group.find_columns()
            if group.state == "settled":
                self.groups.arrive(group)
            self.groups.add(group)
            last = max(last, group.order)
        self.groups.orders = itertools.count(last + 1)
        self.segments.free_unneeded()

    def number_after(self, old: "QueueCore") -> None:
        """Number leases and segments after those of a discarded state, which clients may still name."""
        self.lease_ids = old.lease_ids
        self.segments.number_after(old.segments)

    # -- inside

    def _settle(self, group: QueuedGroup) -> None:
        """Mark the group as settled once all sessions are, or drop it if it has no rows."""
        if len(group.settled) + len(group.failures) == group.num_sessions:
            for lease_id in {i for name, i in group.leased.items() if name == GENERATE}:
                self._leave_claim(group, lease_id)
            if group.parts:
                group.state = "settled"
                self.groups.arrive(group)
                group.find_columns()
            else:
                reasons = "; ".join(sorted(set(group.failures.values()))) or "its sessions returned no trajectories"
                group.state, group.reason = "dropped", f"no rows: {reasons}"
                self.drops["no rows"] += 1
        self._changed(group)

    def _count_ack(self, group: QueuedGroup, task: str, number: int) -> None:
        group.acked[task] = number
        if group.acked.keys() >= self.specs.keys():
            group.state = "done"
            self._free_rows(group)
        self._changed(group)

    def _leave_claim(self, group: QueuedGroup, lease_id: int) -> None:
        claim = self.leases[lease_id]
        claim.groups.remove(group)
        group.leased.pop(GENERATE)
        if not claim.groups:
            del self.leases[lease_id]
            self._note_end(lease_id, "was fulfilled")

    def _is_stale(self, group: QueuedGroup, task: TaskSpec) -> bool:
        return (
            task.max_staleness is not None
            and group.oldest >= 0
            and self.policy_version - group.oldest > task.max_staleness
        )

    def _lose_late(self, group: QueuedGroup, segment_id: int) -> None:
        for part in [part for part in group.late if part.segment == segment_id]:
            group.remove_late(part)
            group.acked.pop(part.task, None)
            self.segments.release(segment_id)
        self._changed(group)

    def _free_rows(self, group: QueuedGroup) -> None:
        for number in group.segments():
            self.segments.release(number)
        group.clear()

    def _note_expiry(self, lease: RunningLease) -> None:
        heapq.heappush(self._expiries, (lease.expires_at, lease.lease_id))
        if len(self._expiries) > 2 * len(self.leases) + SPARE_ENTRIES:
            self._expiries = [(running.expires_at, number) for number, running in self.leases.items()]
            heapq.heapify(self._expiries)

    def _note_end(self, lease_id: int, how: str) -> None:
        self.ended[lease_id] = how
        if len(self.ended) > 10_000:
            del self.ended[next(iter(self.ended))]

    def _changed(self, group: QueuedGroup) -> None:
        self.num_changes += 1
        self.dirty[group.uid] = group
        self.groups.refresh(group)
