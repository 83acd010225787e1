"""The groups of a queue in issue order, counted as they change.

What a waiter asks (how many are ready, how many may become so, how many rows are held) costs the same
however many groups there are: waiters ask again at every change.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_core.queue.group import QueuedGroup
from rl_core.queue.interface import PromptState, TaskSpec
from rl_core.records import Prompt


class _Counted(NamedTuple):
    """What a group added to the counts when it was last refreshed."""

    state: PromptState
    num_rows: int
    size_bytes: int


class GroupIndex:
    """Groups by uid, by state, and by readiness for each task."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        """Start empty, for these tasks."""
        self._tasks = tuple(tasks)
        self._orders = itertools.count()
        self._groups: dict[str, QueuedGroup] = {}
        self._counted: dict[int, _Counted] = {}
        self._ready: dict[str, dict[int, QueuedGroup]] = {task.name: {} for task in tasks}
        self._possible: dict[str, set[int]] = {task.name: set() for task in tasks}
        self._states: Counter[PromptState] = Counter()
        self.num_rows = 0
        self.size_bytes = 0

    def __iter__(self) -> Iterator[QueuedGroup]:
        """Groups in issue order."""
        return iter(self._groups.values())

    def __contains__(self, prompt_uid: str) -> bool:
        return prompt_uid in self._groups

    def get(self, prompt_uid: str) -> QueuedGroup | None:
        """The group of a prompt."""
        return self._groups.get(prompt_uid)

    def add(self, prompt: Prompt, *, num_sessions: int, issued_at: float) -> None:
        """Enter a prompt."""
        group = QueuedGroup(prompt=prompt, order=next(self._orders), num_sessions=num_sessions, issued_at=issued_at)
        self._groups[prompt.uid] = group
        self.refresh(group)

    def refresh(self, group: QueuedGroup) -> None:
        """Count a group again; call it after every change of one."""
        self._uncount(group)
        self._counted[group.order] = _Counted(group.state, group.num_rows, group.size_bytes)
        self._states[group.state] += 1
        self.num_rows += group.num_rows
        self.size_bytes += group.size_bytes
        for task in self._tasks:
            if group.is_ready_for(task):
                self._ready[task.name][group.order] = group
            if group.may_become_ready_for(task):
                self._possible[task.name].add(group.order)

    def remove_finished(self) -> int:
        """Take done and dropped groups out, and say how many."""
        finished = [group for group in self if group.state in ("done", "dropped")]
        for group in finished:
            self._uncount(group)
            del self._groups[group.prompt.uid]
        return len(finished)

    def num_ready(self, task: TaskSpec) -> int:
        """How many groups a task may lease now."""
        return len(self._ready[task.name])

    def num_possible(self, task: TaskSpec) -> int:
        """How many groups a task may lease now or later, those that it has leased included."""
        return len(self._possible[task.name])

    def first_ready(self, task: TaskSpec, num_groups: int) -> list[QueuedGroup]:
        """The groups issued first among those ready for a task."""
        ready = self._ready[task.name]
        return [ready[order] for order in heapq.nsmallest(num_groups, ready)]

    def num_in(self, state: PromptState) -> int:
        """How many groups are in a state."""
        return self._states[state]

    def states(self) -> dict[str, int]:
        """How many groups are in each state that has any, by name."""
        return {state: count for state, count in sorted(self._states.items()) if count}

    def describe_states(self) -> str:
        """Such as "3 issued, 1 settled"."""
        return ", ".join(f"{count} {state}" for state, count in self.states().items()) or "nothing issued"

    def describe_wait(self, task: TaskSpec, *, now: float) -> str:
        """Why a task does not get more groups."""
        parts = [f"{self.num_ready(task)} ready", self.describe_states()]
        first = next((group for group in self if group.state == "issued"), None)
        if first is not None:
            lacking_s = now - first.issued_at
            parts.append(f"prompt {first.prompt.uid!r} lacks sessions {first.missing_sessions} since {lacking_s:.1f} s")
        lacking = [task.needs - group.batch.names for group in self if group.batch is not None]
        columns = sorted(frozenset().union(*lacking))
        if columns:
            parts.append(f"{sum(map(bool, lacking))} groups lack columns {columns}")
        num_leased = sum(task.name in group.leased_by for group in self)
        if num_leased:
            parts.append(f"{num_leased} leased by another consumer of this task")
        return ", ".join(parts)

    def _uncount(self, group: QueuedGroup) -> None:
        counted = self._counted.pop(group.order, None)
        if counted is None:
            return
        self._states[counted.state] -= 1
        self.num_rows -= counted.num_rows
        self.size_bytes -= counted.size_bytes
        for task in self._tasks:
            self._ready[task.name].pop(group.order, None)
            self._possible[task.name].discard(group.order)
