"""What roles are made of: processes beneath them, for who looks for the reason of a hang, and their memory."""

from collections.abc import Callable, Mapping, Sequence

from rl_async_trainer.settings import AsyncSettings
from rl_core.cluster.role_report import RoleReport
from rl_core.cluster.stacks import is_silent
from rl_metrics.reductions.memory import MemoryWatch
from rl_rollout.engines.engine_load import EngineLoad
from rl_trainer.reporting.step_metrics import make_memory_watch

ENGINE, RANK = "engine", "rank"


def role_memory_watch(
    settings: AsyncSettings, owner: str, *, say: Callable[..., None] | None = None
) -> MemoryWatch | None:
    """Measures the memory of a role's process; None where it is the controller's, which has its own watch."""
    return None if settings.roles.kind == "inline" else make_memory_watch(settings, owner, say=say)


def engine_reports(loads: Sequence[EngineLoad], stacks: Mapping[int, str], *, asked_s: float) -> list[RoleReport]:
    """Each engine that has a process of its own.

    Args:
        loads: Of all engines.
        stacks: By the engine's index; the others are in the rollouter's process.
        asked_s: How long one that does not answer has not, at least.
    """
    return [
        _report(f"{ENGINE}[{load.index}]", stacks[load.index], asked_s, state=load.state, running=load.num_running)
        for load in loads
        if load.index in stacks
    ]


def rank_reports(stacks: Sequence[str], *, asked_s: float) -> list[RoleReport]:
    """Each rank that has a process of its own.

    Args:
        stacks: In the order of ranks.
        asked_s: How long one that does not answer has not, at least.
    """
    return [_report(f"{RANK}[{index}]", stack, asked_s) for index, stack in enumerate(stacks)]


def _report(name: str, stack: str, asked_s: float, *, state: str = "serving", running: int = 0) -> RoleReport:
    is_answering = not is_silent(stack)
    return RoleReport(
        name=name,
        state="serving" if state == "draining" else state,
        since_s=0.0 if is_answering else asked_s,
        stack=stack,
        counts={"running": float(running)},
        is_answering=is_answering,
    )
