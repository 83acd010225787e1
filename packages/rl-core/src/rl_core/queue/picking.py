"""Selection of groups for a request: the next ones in the task's order, or named ones."""

from collections import Counter
from collections.abc import Callable, Sequence

from rl_core.errors import DataError
from rl_core.queue.group import QueuedGroup
from rl_core.queue.index import GroupIndex, TaskGroups
from rl_core.queue.messages import GENERATE, Finish, LeaseRequest

LARGEST_LIST = 20
"""Maximum number of prompts that an error lists."""

DropStale = Callable[[QueuedGroup], bool]
"""Drops a group that is too stale for the task, and returns whether it did."""


class Blocked:
    """What blocks a lease of named prompts; makes retries cost O(1) in the number of prompts."""

    def __init__(self) -> None:
        """Start without a blocking group."""
        self._task: TaskGroups | None = None
        self._group: QueuedGroup | None = None
        self._mark = (0, 0)

    def is_still(self, task: TaskGroups, *, policy_version: int) -> bool:
        """Return True while the same group is not ready, the task lost no group, and no group can have become stale."""
        return (
            self._task is task  # not from a discarded state
            and self._group is not None
            and not task.is_ready(self._group)
            and self._mark == (task.num_left, policy_version)
        )

    def note(self, groups: GroupIndex, request: LeaseRequest, *, policy_version: int) -> None:
        """Store the last group that is not ready: most groups become ready in the order of their names."""
        self._task = groups.tasks[request.task]
        named = (groups.find_open(uid) for uid in reversed(request.prompts))
        self._group = next(group for group in named if not self._task.is_ready(group))
        self._mark = (self._task.num_left, policy_version)


def pick_next(groups: GroupIndex, request: LeaseRequest, *, drop_stale: DropStale) -> list[QueuedGroup] | None:
    """Return the requested number of groups in the task's order; None until they are ready."""
    task = groups.task_of(request)
    picked: list[QueuedGroup] = []
    if _may_suffice(task, request):
        while len(picked) < request.groups:
            group = task.peek()
            if group is None or not task.is_ready(group):
                break
            if drop_stale(group):
                continue
            picked.append(task.take())
    is_all = request.task == GENERATE or (request.allow_fewer and len(picked) == task.num_possible)
    is_enough = bool(picked) and (is_all or len(picked) == request.groups)
    for group in picked:
        if is_enough:
            task.let_go(group)
        else:
            task.put_back(group)
    return picked if is_enough else None


def pick_named(groups: GroupIndex, request: LeaseRequest, *, drop_stale: DropStale) -> list[QueuedGroup] | None:
    """Return the named groups in the given order; None while one of them is not ready.

    Raises:
        DataError: A group can never become ready, was acked by the task, or was dropped as too stale.
    """
    task = groups.tasks[request.task]
    named = [groups.find_open(uid) for uid in request.prompts]
    acked = next((group.uid for group in named if task.name in group.acked), None)
    if acked is not None:
        raise DataError(f"prompt {acked!r} was already acked by task {task.name!r}; a task acks each prompt once.")
    stale = [group.uid for group in named if task.is_ready(group) and drop_stale(group)]
    if stale:
        raise DataError(
            f"{len(stale)} of {len(named)} prompts exceed max_staleness = {task.spec.max_staleness} of task "
            f"{task.name!r} and were dropped: {listed(stale)}. Lease the others without them."
        )
    return named if all(task.is_ready(group) for group in named) else None


def finished_groups(groups: GroupIndex, finish: Finish) -> list[QueuedGroup]:
    """Return groups that a task may ack without a lease: they are ready for it and not leased for it.

    Raises:
        DataError: The task adds columns, or a group does not qualify.
    """
    task = groups.find_task(finish.task)
    if task.spec.gives:
        raise DataError(
            f"task {task.name!r} adds {sorted(task.spec.gives)}, so it must ack a lease with these columns."
        )
    check_once(finish.prompts)
    found = [(uid, groups.get(uid)) for uid in finish.prompts]
    acked = [uid for uid, group in found if group is not None and task.name in group.acked]
    if acked:
        raise DataError(
            f"{len(acked)} of {len(found)} prompts were already acked by task {task.name!r}: {listed(acked)}. Nothing "
            "is acked now; a task acks each prompt once."
        )
    named = [groups.find_open(uid) for uid in finish.prompts]
    lacking = [_why_not_ready(task, group) for group in named if not task.is_ready(group)]
    if lacking:
        raise DataError(
            f"task {task.name!r} cannot finish {len(lacking)} of {len(named)} prompts: "
            f"{listed(lacking, quoted=False)}. Nothing is acked now. Finish only prompts that the task has leased and "
            "released."
        )
    return named


def check_once(uids: Sequence[str]) -> None:
    """Check that no prompt is named twice.

    Raises:
        DataError: A prompt is named twice.
    """
    doubled = [uid for uid, count in Counter(uids).items() if count > 1]
    if doubled:
        raise DataError(f"each prompt must be named once; found {listed(doubled)} more than once.")


def describe_named(groups: GroupIndex, request: LeaseRequest) -> str:
    """Describe which named groups are not ready, and why."""
    task = groups.tasks[request.task]
    named = [groups.find_open(uid) for uid in request.prompts]
    lacking = [_why_not_ready(task, group) for group in named if not task.is_ready(group)]
    return f"{len(lacking)} not ready: {listed(lacking, quoted=False)}"


def listed(items: list[str], *, quoted: bool = True) -> str:
    """Return the first items as text, with the number of the others."""
    preview = ", ".join(repr(item) if quoted else item for item in items[:LARGEST_LIST])
    return preview + (f" and {len(items) - LARGEST_LIST} more" if len(items) > LARGEST_LIST else "")


def _why_not_ready(task: TaskGroups, group: QueuedGroup) -> str:
    if group.state == "issued":
        return f"{group.uid!r} lacks {len(group.missing_sessions)} of {group.num_sessions} sessions"
    if task.name in group.leased:
        return f"{group.uid!r} is leased by a consumer of this task (lease {group.leased[task.name]})"
    return f"{group.uid!r} lacks columns {sorted(task.needs - group.columns)}"


def _may_suffice(task: TaskGroups, request: LeaseRequest) -> bool:
    """Return False if the counts alone show that too few groups are ready."""
    if request.task == GENERATE:
        return task.num_ready > 0
    return task.num_ready >= request.groups or (request.allow_fewer and 0 < task.num_ready == task.num_possible)
