"""An index of a queue's groups with counts that are updated at every change.

Counts (ready groups, groups that may become ready, stored rows) cost O(1), because waiters query them at every change.
A task's next group comes from a heap in O(log n).
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_core.errors import DataError
from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import PromptState, TaskSpec
from rl_core.queue.messages import GENERATE, LeaseRequest

SPARE_ENTRIES = 1_000
"""Maximum number of outdated entries in a heap before they are removed."""


class Counted(NamedTuple):
    """A group's contribution to the counts at its last refresh; `ready` and `possible` are bit sets of tasks."""

    state: PromptState
    num_rows: int
    size_bytes: int
    ready: int
    possible: int


NOT_COUNTED = Counted("issued", 0, 0, 0, 0)


class TaskGroups:
    """The groups of one task: counts, and a heap of the next ones.

    The heap may contain groups that are no longer available; they are skipped when reached. It never contains a group
    twice: the group's `queued` bit marks membership.
    """

    def __init__(self, spec: TaskSpec, bit: int) -> None:
        """Start empty."""
        self.spec = spec
        self.name, self.needs, self.is_of_claims = spec.name, spec.needs, spec.name == GENERATE
        self.bit = bit
        self.num_ready = self.num_possible = self.num_left = 0
        self._heap: list[tuple[int, int, QueuedGroup]] = []

    def bits(self, group: QueuedGroup) -> tuple[int, int]:
        """Return this task's bit for groups it may lease now, and for groups it may lease now or later."""
        if self.is_of_claims:
            is_possible, is_there = group.state == "issued", True
        else:
            is_possible = group.is_open and self.name not in group.acked
            is_there = group.state == "settled" and self.needs <= group.columns
        is_ready = is_possible and is_there and self.name not in group.leased
        return self.bit * is_ready, self.bit * is_possible

    def is_ready(self, group: QueuedGroup) -> bool:
        """Return True if the task may lease this group now."""
        return bool(group.counted.ready & self.bit)

    def offer(self, group: QueuedGroup) -> None:
        """Add a group to the heap unless it is there."""
        if not group.queued & self.bit and self._is_candidate(group):
            group.queued |= self.bit
            heapq.heappush(self._heap, (self._key(group), group.order, group))
            if len(self._heap) > 2 * self.num_possible + SPARE_ENTRIES:
                self._sweep()

    def peek(self) -> QueuedGroup | None:
        """Return the next group; in issue order, it may not be ready yet."""
        while self._heap:
            key, _, group = self._heap[0]
            is_current = key == self._key(group)  # otherwise it was issued again under a new key
            if is_current and self._is_candidate(group):
                return group
            heapq.heappop(self._heap)
            if is_current:
                group.queued &= ~self.bit
        return None

    def take(self) -> QueuedGroup:
        """Remove the first group; changes do not add it again before `put_back` or `let_go`."""
        return heapq.heappop(self._heap)[2]

    def let_go(self, group: QueuedGroup) -> None:
        """Mark a taken group as leased."""
        group.queued &= ~self.bit

    def put_back(self, group: QueuedGroup) -> None:
        """Return a taken group that was not leased."""
        self.let_go(group)
        self.offer(group)

    def _key(self, group: QueuedGroup) -> int:
        return group.order if self.spec.order == "issue" else group.arrival

    def _sweep(self) -> None:
        """Remove unavailable groups, so that the heap does not keep finished groups alive."""
        kept = []
        for entry in self._heap:
            if self._is_candidate(entry[2]):
                kept.append(entry)
            else:
                entry[2].queued &= ~self.bit
        heapq.heapify(kept)
        self._heap = kept

    def _is_candidate(self, group: QueuedGroup) -> bool:
        if self.spec.order == "issue":
            return bool(group.counted.possible & self.bit) and self.name not in group.leased
        return bool(group.counted.ready & self.bit)


class GroupIndex:
    """Groups by uid, by state, and by readiness for each task."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        """Create an empty index for these tasks and for claims."""
        claims = TaskSpec(name=GENERATE, needs=frozenset(), order="issue")
        self._every = tuple(TaskGroups(spec, 1 << i) for i, spec in enumerate((*tasks, claims)))
        self.tasks = {task.name: task for task in self._every if not task.is_of_claims}
        self._claims = self._every[-1]
        self.orders = itertools.count()
        self._groups: dict[str, QueuedGroup] = {}
        self.groups_in: Counter[PromptState] = Counter()
        self._rows_in: Counter[PromptState] = Counter()
        self._bytes_in: Counter[PromptState] = Counter()
        self._finished: dict[int, QueuedGroup] = {}
        self.issued: dict[int, QueuedGroup] = {}
        self.num_rows = 0
        self.size_bytes = 0
        self._arrivals = itertools.count()
        self._arrival_bits = sum(task.bit for task in self._every if task.spec.order == "arrival")

    def __iter__(self) -> Iterator[QueuedGroup]:
        """Iterate over the groups in issue order."""
        return iter(self._groups.values())

    def __contains__(self, prompt_uid: str) -> bool:
        return prompt_uid in self._groups

    def get(self, prompt_uid: str) -> QueuedGroup | None:
        """Return the group of a prompt."""
        return self._groups.get(prompt_uid)

    def find_open(self, prompt_uid: str) -> QueuedGroup:
        """Return an unfinished group.

        Raises:
            DataError: The prompt is unknown, done or dropped.
        """
        group = self._groups.get(prompt_uid)
        if group is None:
            raise DataError(f"prompt {prompt_uid!r} was never issued or is forgotten; issue it first.")
        if not group.is_open:
            why = f" ({group.reason})" if group.reason else ""
            raise DataError(f"prompt {prompt_uid!r} is {group.state}{why}; no further change is possible.")
        return group

    def task_of(self, request: LeaseRequest) -> TaskGroups:
        """Return the groups of a lease's task or of claims.

        Raises:
            DataError: The task does not exist.
        """
        return self._claims if request.task == GENERATE else self.find_task(request.task)

    def find_task(self, name: str) -> TaskGroups:
        """Return a declared task.

        Raises:
            DataError: The task was not declared.
        """
        if name not in self.tasks:
            raise DataError(f"unknown task {name!r}; declared tasks: {sorted(self.tasks)}.")
        return self.tasks[name]

    def add(self, group: QueuedGroup) -> None:
        """Add a prompt."""
        self._groups[group.uid] = group
        self.refresh(group)

    def arrive(self, group: QueuedGroup) -> None:
        """Assign the next arrival number to a complete group; a reissued group gets a new number."""
        group.arrival = next(self._arrivals)
        group.queued &= ~self._arrival_bits

    def refresh(self, group: QueuedGroup) -> None:
        """Update the counts of a group; call this after every change to it."""
        ready = possible = 0
        for task in self._every:
            is_ready, is_possible = task.bits(group)
            ready |= is_ready
            possible |= is_possible
        old = group.counted
        new = Counted(group.state, group.num_rows, group.size_bytes, ready, possible)
        if new != old:
            self._count(old or NOT_COUNTED, new, is_new=old is None)
            group.counted = new
            self._place(group)
        for task in self._every:
            task.offer(group)

    def _place(self, group: QueuedGroup) -> None:
        """Move a group to the collection of its state."""
        if group.state == "issued":
            self.issued[group.order] = group
        else:
            self.issued.pop(group.order, None)
            if not group.is_open:
                self._finished[group.order] = group

    def remove_finished(self) -> list[QueuedGroup]:
        """Remove done and dropped groups."""
        finished = list(self._finished.values())
        self._finished.clear()
        for group in finished:
            self.groups_in[group.state] -= 1
            del self._groups[group.uid]
        return finished

    def counts(self) -> dict[str, float]:
        """Return groups, rows and bytes for each non-empty state."""
        counters = {"groups": self.groups_in, "rows": self._rows_in, "size_bytes": self._bytes_in}
        return {
            f"{name}/{state}": count
            for name, counter in counters.items()
            for state, count in sorted(counter.items())
            if count
        }

    def describe_states(self) -> str:
        """Return a summary such as "3 issued, 1 settled"."""
        return ", ".join(f"{n} {state}" for state, n in sorted(self.groups_in.items()) if n) or "nothing issued"

    def describe_wait(self, task: TaskGroups, *, now: float) -> str:
        """Describe why a task or producer does not receive more groups."""
        parts = [f"{task.num_ready} ready", self.describe_states()]
        first = next(iter(self.issued.values()), None)
        if first is not None:
            lacking_s = now - first.issued_at
            parts.append(f"prompt {first.uid!r} has lacked sessions {first.missing_sessions} for {lacking_s:.1f} s")
        settled = [group for group in self if group.state == "settled"]
        lacking = [task.spec.needs - group.columns for group in settled]
        columns = sorted(frozenset().union(*lacking))
        if columns:
            parts.append(f"{sum(map(bool, lacking))} groups lack columns {columns}")
        num_leased = sum(task.name in group.leased for group in self)
        if num_leased:
            parts.append(f"{num_leased} leased by another consumer of this task")
        return ", ".join(parts)

    def _count(self, old: Counted, new: Counted, *, is_new: bool) -> None:
        self.groups_in[old.state] -= not is_new
        self.groups_in[new.state] += 1
        self._rows_in[old.state] -= old.num_rows
        self._rows_in[new.state] += new.num_rows
        self._bytes_in[old.state] -= old.size_bytes
        self._bytes_in[new.state] += new.size_bytes
        self.num_rows += new.num_rows - old.num_rows
        self.size_bytes += new.size_bytes - old.size_bytes
        for task in self._every:
            task.num_ready += bool(new.ready & task.bit) - bool(old.ready & task.bit)
            could, can = bool(old.possible & task.bit), bool(new.possible & task.bit)
            task.num_possible += can - could
            task.num_left += could and not can
