"""Agent loops, which turn prompts into trajectories."""

from rl_rollout.loops.conversation import TurnLimits
from rl_rollout.loops.environment import Environment, EnvironmentLoop, EnvironmentOptions
from rl_rollout.loops.options import LOOPS, resolve_loop
from rl_rollout.loops.protocol import AgentLoop, AgentTask, LoopContext, SessionLoop, SessionResult
from rl_rollout.loops.single_turn import SingleTurnLoop, trajectory_of, with_reward
from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
from rl_rollout.loops.turns import TurnFormat

__all__ = [
    "LOOPS",
    "AgentLoop",
    "AgentTask",
    "Environment",
    "EnvironmentLoop",
    "EnvironmentOptions",
    "LoopContext",
    "SessionLoop",
    "SessionResult",
    "SingleTurnLoop",
    "ToolsLoop",
    "ToolsOptions",
    "TurnFormat",
    "TurnLimits",
    "resolve_loop",
    "trajectory_of",
    "with_reward",
]
