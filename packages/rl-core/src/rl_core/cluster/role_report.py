"""Reports of roles on their current activity."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_core.cluster.stacks import is_silent


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """A role's own view of its current activity.

    Attributes:
        doing: Description of the activity, as `status` prints it.
        counts: Further counts, by name; a change is progress.
    """

    doing: str
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """The report of one role.

    Attributes:
        name: Name such as "rollouter", "engine 1" or "learner[0]"; brackets mark ranks of one role.
        state: State of `Role`: starting, serving, restarting, dead or closed.
        since_s: Seconds in this state; for an unresponsive role, seconds without an answer.
        doing: Description of its activity; empty if unknown.
        stack: Text from `Role.stacks`; empty if not requested.
        counts: Further counts by name, such as "running".
        is_answering: False if it did not answer a request in time.
    """

    name: str
    state: str = "serving"
    since_s: float = 0.0
    doing: str = ""
    stack: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    is_answering: bool = True


def process_report(
    name: str, stack: str, *, asked_s: float, state: str = "serving", num_running: int = 0
) -> RoleReport:
    """Create the report of a role's subordinate process, such as an engine or a rank, from its stacks.

    Args:
        name: Name such as "engine[0]".
        stack: Text from `Role.stacks`.
        asked_s: Minimum seconds that an unresponsive process has not answered.
        state: See `RoleReport`.
        num_running: Number of running requests.
    """
    is_answering = not is_silent(stack)
    return RoleReport(
        name=name,
        state=state,
        since_s=0.0 if is_answering else asked_s,
        stack=stack,
        counts={"running": float(num_running)},
        is_answering=is_answering,
    )
