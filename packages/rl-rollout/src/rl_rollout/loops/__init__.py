"""Agent loops: what happens between a prompt and its trajectories."""

from rl_rollout.loops.protocol import AgentLoop, LoopContext, SessionLoop, SessionResult, stable_seed
from rl_rollout.loops.registry import resolve_loop
from rl_rollout.loops.single_turn import SingleTurnLoop, trajectory_of, with_reward

__all__ = [
    "AgentLoop",
    "LoopContext",
    "SessionLoop",
    "SessionResult",
    "SingleTurnLoop",
    "resolve_loop",
    "stable_seed",
    "trajectory_of",
    "with_reward",
]
