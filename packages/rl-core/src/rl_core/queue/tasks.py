"""Checks of tasks: rollouts or other tasks must add every column that a task needs."""

from collections.abc import Sequence

from rl_core.annotation_rules import expect, several
from rl_core.data.columns import BUILT_IN, column_spec
from rl_core.errors import SettingsError
from rl_core.queue.interface import QueueOptions, TaskSpec
from rl_core.queue.messages import GENERATE

ROLLOUT_COLUMNS = frozenset(
    {
        "input_ids",
        "loss_mask",
        "rollout_logprobs",
        "policy_versions",
        "reward",
        "is_truncated",
        "num_prompt_tokens",
        "routed_experts",
    }
)
"""Columns that rows have from `put`; `reward` only if every row of the group has one, `routed_experts` if any has one.
"""


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
