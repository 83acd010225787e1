"""The groups of a queue, counted as they change.

What a waiter asks (how many are ready, how many may become so, how many rows are held) costs the same however many
groups there are: waiters ask again at every change. The next groups of a task come from a heap, in the logarithm.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import PromptState, TaskSpec


class _Counted(NamedTuple):
    """What a group added to the counts when it was last refreshed; bits of tasks in `ready` and `possible`."""

    state: PromptState
    num_rows: int
    num_tokens: int
    size_bytes: int
    ready: int
    possible: int


class TaskGroups:
    """The groups of one task: counts, and a heap of those that come next.

    The heap may hold groups that are no longer to be had, which are passed over when they come up, and never holds a
    group twice: the group's `queued` bit says whether it is in.
    """

    def __init__(self, spec: TaskSpec, bit: int) -> None:
        """Start empty."""
        self.spec = spec
        self.bit = bit
        self.num_ready = self.ready_rows = self.ready_tokens = self.num_possible = 0
        self._heap: list[tuple[int, int, QueuedGroup]] = []

    def offer(self, group: QueuedGroup) -> None:
        """Enter a group that comes up next, or later, unless it is in already."""
        if self._is_candidate(group) and not group.queued & self.bit:
            group.queued |= self.bit
            key = group.order if self.spec.order == "issue" else group.arrival
            heapq.heappush(self._heap, (key, group.order, group))

    def peek(self) -> QueuedGroup | None:
        """The group that comes next, ready or, in the order of issue, not yet."""
        while self._heap:
            group = self._heap[0][2]
            if self._is_candidate(group):
                return group
            self.pop()
        return None

    def pop(self) -> None:
        """Take the first out."""
        heapq.heappop(self._heap)[2].queued &= ~self.bit

    def _is_candidate(self, group: QueuedGroup) -> bool:
        if self.spec.order == "issue":
            return self.spec.name not in group.leased and group.may_become_ready_for(self.spec)
        return group.is_ready_for(self.spec)


class GroupIndex:
    """Groups by uid, by state, and by readiness for each task; `touched` has the tasks whose counts have changed."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        """Start empty, for these tasks."""
        self.tasks = {task.name: TaskGroups(task, 1 << i) for i, task in enumerate(tasks)}
        self._orders = itertools.count()
        self._groups: dict[str, QueuedGroup] = {}
        self._groups_in: Counter[str] = Counter()
        self._rows_in: Counter[str] = Counter()
        self._bytes_in: Counter[str] = Counter()
        self._finished: dict[int, QueuedGroup] = {}
        self.issued: dict[int, QueuedGroup] = {}
        self.partly: dict[int, QueuedGroup] = {}
        self.num_rows = 0
        self.size_bytes = 0
        self.touched: set[str] = set()

    def __iter__(self) -> Iterator[QueuedGroup]:
        """Groups in issue order."""
        return iter(self._groups.values())

    def __contains__(self, prompt_uid: str) -> bool:
        return prompt_uid in self._groups

    def get(self, prompt_uid: str) -> QueuedGroup | None:
        """The group of a prompt."""
        return self._groups.get(prompt_uid)

    def next_order(self) -> int:
        """Number of the next prompt."""
        return next(self._orders)

    def add(self, group: QueuedGroup) -> None:
        """Enter a prompt."""
        self._groups[group.uid] = group
        self.refresh(group)

    def start_after(self, order: int) -> None:
        """Number new prompts from here on."""
        self._orders = itertools.count(order + 1)

    def refresh(self, group: QueuedGroup) -> None:
        """Count a group again; call it after every change of one."""
        old, new = group.counted, self._count(group)
        if old is not None:
            self._add(group, old, -1)
        self._add(group, new, 1)
        group.counted = new
        (self.issued.__setitem__(group.order, group) if group.state == "issued" else self.issued.pop(group.order, None))
        is_partly = group.state == "issued" and new.num_rows > 0
        (self.partly.__setitem__(group.order, group) if is_partly else self.partly.pop(group.order, None))
        if not group.is_open:
            self._finished[group.order] = group
        for name, task in self.tasks.items():
            if old is None or (old.ready ^ new.ready | old.possible ^ new.possible) & task.bit:
                self.touched.add(name)
            task.offer(group)

    def remove_finished(self) -> list[QueuedGroup]:
        """Take done and dropped groups out."""
        finished = list(self._finished.values())
        for group in finished:
            self._add(group, group.counted, -1)
            del self._groups[group.uid]
        self._finished.clear()
        return finished

    def num_in(self, state: PromptState) -> int:
        """How many groups are in a state."""
        return self._groups_in[state]

    def counts(self) -> dict[str, float]:
        """Groups, rows and bytes in each state that has any."""
        named = {"groups": self._groups_in, "rows": self._rows_in, "size_bytes": self._bytes_in}
        return {f"{name}/{state}": n for name, counter in named.items() for state, n in sorted(counter.items()) if n}

    def describe_states(self) -> str:
        """Such as "3 issued, 1 settled"."""
        return ", ".join(f"{n} {state}" for state, n in sorted(self._groups_in.items()) if n) or "nothing issued"

    def describe_wait(self, name: str, *, now: float) -> str:
        """Why a task does not get more groups."""
        task = self.tasks[name]
        parts = [f"{task.num_ready} ready", self.describe_states()]
        first = next(iter(self.issued.values()), None)
        if first is not None:
            lacking_s = now - first.issued_at
            parts.append(f"prompt {first.uid!r} lacks sessions {first.missing_sessions} since {lacking_s:.1f} s")
        lacking = [task.spec.needs - group.columns for group in self if group.state == "settled"]
        columns = sorted(frozenset().union(*lacking))
        if columns:
            parts.append(f"{sum(map(bool, lacking))} groups lack columns {columns}")
        num_leased = sum(name in group.leased for group in self)
        if num_leased:
            parts.append(f"{num_leased} leased by another consumer of this task")
        return ", ".join(parts)

    def _count(self, group: QueuedGroup) -> _Counted:
        ready = possible = 0
        for task in self.tasks.values():
            ready |= task.bit * group.is_ready_for(task.spec)
            possible |= task.bit * group.may_become_ready_for(task.spec)
        return _Counted(group.state, group.num_rows, group.num_tokens, group.size_bytes, ready, possible)

    def _add(self, group: QueuedGroup, counted: _Counted, sign: int) -> None:
        state, rows, tokens, size_bytes, ready, possible = counted
        self._groups_in[state] += sign
        self._rows_in[state] += sign * rows
        self._bytes_in[state] += sign * size_bytes
        self.num_rows += sign * rows
        self.size_bytes += sign * size_bytes
        for task in self.tasks.values():
            if ready & task.bit:
                task.num_ready += sign
                task.ready_rows += sign * rows
                task.ready_tokens += sign * tokens
            if possible & task.bit:
                task.num_possible += sign
