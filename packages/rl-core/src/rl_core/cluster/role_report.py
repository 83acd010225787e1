"""What a role says of itself when it is asked what it does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_core.cluster.stacks import is_silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a role waits for right now.

    Attributes:
        what: In words that follow "has waited for", such as "step 12", "3 of 8 groups" or "room for group p-17".
        on: Whom or what it depends on: a role's name, "groups" (that others make ready), "queue" (room in it), or
            something outside of the run, such as "reward judge".
        since_s: For how long.
    """

    what: str
    on: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """What a role does right now.

    Attributes:
        doing: In words.
        waits: What it waits for.
        holds: Groups that it has.
        counts: Anything that can be counted.
    """

    doing: str
    waits: tuple[Wait, ...] = ()
    holds: tuple[str, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """As `status` prints it: what it does, and its longest wait."""
        longest = max(self.waits, key=lambda wait: wait.since_s, default=None)
        waits = ""
        if longest is not None:
            what = longest.what.partition(", ")[0]  # the names of groups are for hang.json
            waits = f"waits for {what} from {longest.on}, {longest.since_s:.0f} s"
        return "; ".join(part for part in (self.doing, waits) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """What one role does.

    Attributes:
        name: Such as "rollouter", "engine 1" or "learner[0]"; names with brackets are ranks of one role.
        state: As `rl_core.cluster` has it: starting, serving, restarting, dead or closed.
        since_s: How long it has been in this state; of a role that does not answer, how long it has not.
        waits: Its present waits.
        stack: As `Role.stacks` gives it; empty where it was not asked.
        leases: Groups of the queue that it holds.
        counts: Anything that can be counted, such as "running".
        is_answering: False where it was asked and did not answer in time.
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
    """A process beneath a role, such as an engine or a rank, by its stacks.

    Args:
        name: Such as "engine[0]".
        stack: As `Role.stacks` gives it.
        asked_s: How long one that does not answer has not, at least.
        state: As `RoleReport` has it.
        num_running: Requests that it works on.
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
