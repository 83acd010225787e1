"""Agent loops by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_core.errors import SettingsError
from rl_core.registry import Registry
from rl_core.secret_settings import resolve_secrets
from rl_rollout.loops.options import read_options
from rl_rollout.loops.protocol import AgentLoop

LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent loop",
    {
        "single_turn": "rl_rollout.loops.single_turn:SingleTurnLoop",
        "tools": "rl_rollout.loops.tools:ToolsLoop",
        "environment": "rl_rollout.loops.environment:EnvironmentLoop",
        "agent": "rl_rollout.loops.agent:AgentsLoop",
        "verifiers": "rl_rollout.loops.verifiers:VerifiersLoop",
    },
    group="rl_rollout.loops",
)


def resolve_loop(name: str, options: Mapping[str, Any] | None = None) -> AgentLoop:
    """Create the agent loop with this name.

    Args:
        name: A built-in loop, or one that a package registers.
        options: A table for the loop's `Options`, a dataclass that is passed to it. A loop without `Options` accepts
            none. Secrets such as `headers` and `env` may refer to environment variables, "$NAME".

    Raises:
        SettingsError: The loop does not exist, is not a class with `run_group`, or refuses the options.
    """
    loop_class: Any = LOOPS.get(name)
    if not isinstance(loop_class, type) or not callable(getattr(loop_class, "run_group", None)):
        raise SettingsError(f"agent loop {name!r} must be a class with an async `run_group`; found {loop_class!r}.")
    options_class = getattr(loop_class, "Options", None)
    if options_class is None:
        if options:
            raise SettingsError(f"agent loop {name!r} has no options; found {', '.join(map(str, options))}.")
        bare: AgentLoop = loop_class()
        return bare
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        raise SettingsError(f"agent loop {name!r}: its Options must be a dataclass; found {options_class!r}.")
    resolved = resolve_secrets(options or {}, where=f"options of agent loop {name!r}")
    table = read_options(options_class, resolved, where=f"agent loop {name!r}")
    loop: AgentLoop = loop_class(table)
    return loop
