"""Reward functions that score responses, and the scorers that run them."""

from rl_rollout.rewards.answers import last_boxed
from rl_rollout.rewards.build import WeightedReward, build_scorer
from rl_rollout.rewards.judge import JudgeModel
from rl_rollout.rewards.math_verify import MathVerify
from rl_rollout.rewards.options import FailurePolicy, RewardOptions, RewardPart
from rl_rollout.rewards.protocol import AgentRun, RewardFunction, RewardInput, RewardOutput, RewardResult, quick
from rl_rollout.rewards.registry import resolve_reward
from rl_rollout.rewards.rules import LengthTarget, Overlong, exact_match, last_number, number_match
from rl_rollout.rewards.scorer import RewardScorer, Scored, reward_input
from rl_rollout.sandbox import ProgramRun, Sandbox, SandboxLimits, SandboxOptions

__all__ = [
    "AgentRun",
    "FailurePolicy",
    "JudgeModel",
    "LengthTarget",
    "MathVerify",
    "Overlong",
    "ProgramRun",
    "RewardFunction",
    "RewardInput",
    "RewardOptions",
    "RewardOutput",
    "RewardPart",
    "RewardResult",
    "RewardScorer",
    "Sandbox",
    "SandboxLimits",
    "SandboxOptions",
    "Scored",
    "WeightedReward",
    "build_scorer",
    "exact_match",
    "last_boxed",
    "last_number",
    "number_match",
    "quick",
    "resolve_reward",
    "reward_input",
]
