"""Agent loops by name."""

from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_rollout.loops.protocol import AgentLoop

LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent loop",
    {"single_turn": "rl_rollout.loops.single_turn:SingleTurnLoop"},
    group="rl_rollout.loops",
)


def resolve_loop(name: str) -> AgentLoop:
    """Make the agent loop of this name.

    Raises:
        SettingsError: There is no such loop, or it is not a class with `run_group`.
    """
    loop_class = LOOPS.get(name)
    if not isinstance(loop_class, type) or not callable(getattr(loop_class, "run_group", None)):
        raise SettingsError(f"agent loop {name!r} must be a class with an async `run_group`; found {loop_class!r}.")
    loop: AgentLoop = loop_class()
    return loop
