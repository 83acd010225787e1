"""Reports of roles on their current activity."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_core.cluster.stacks import is_silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A current wait of a role.

    Attributes:
        what: Text that follows "has waited for", such as "step 12", "3 of 8 groups" or "room for group p-17".
        on: The dependency: a role's name, "groups" (from other roles), "queue" (its capacity), or something outside of
            the run, such as "reward judge".
        since_s: Duration of the wait in seconds.
    """

    what: str
    on: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """A role's own view of its current activity.

    Attributes:
        doing: Description of the activity.
        waits: Current waits.
        holds: Groups that it currently processes.
        counts: Further counts, by name.
    """

    doing: str
    waits: tuple[Wait, ...] = ()
    holds: tuple[str, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Format the activity and the longest wait, as `status` prints them."""
        longest = max(self.waits, key=lambda wait: wait.since_s, default=None)
        waits = ""
        if longest is not None:
            what = longest.what.partition(", ")[0]  # omit the names of groups, which are in hang.json
            waits = f"waits for {what} from {longest.on}, {longest.since_s:.0f} s"
        return "; ".join(part for part in (self.doing, waits) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """The report of one role.

    Attributes:
        name: Name such as "rollouter", "engine 1" or "learner[0]"; brackets mark ranks of one role.
        state: State of `Role`: starting, serving, restarting, dead or closed.
        since_s: Seconds in this state; for an unresponsive role, seconds without an answer.
        waits: Current waits.
        stack: Text from `Role.stacks`; empty if not requested.
        leases: Groups of the queue that it has leased.
        counts: Further counts by name, such as "running".
        is_answering: False if it did not answer a request in time.
    """

    name: str
    state: str = "serving"
    since_s: float = 0.0
    waits: tuple[Wait, ...] = ()
    stack: str = ""
    leases: tuple[str, ...] = ()
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
