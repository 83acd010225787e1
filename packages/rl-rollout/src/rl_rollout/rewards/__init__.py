"""Rewards: functions that judge responses, and what runs them."""

from rl_rollout.rewards.custom import load_function
from rl_rollout.rewards.math_verify import MathVerify
from rl_rollout.rewards.protocol import RewardFunction, RewardInput, RewardOutput, RewardResult, quick
from rl_rollout.rewards.registry import resolve_reward
from rl_rollout.rewards.rules import exact_match, last_boxed, last_number, number_match
from rl_rollout.rewards.scorer import RewardScorer, Scored

__all__ = [
    "MathVerify",
    "RewardFunction",
    "RewardInput",
    "RewardOutput",
    "RewardResult",
    "RewardScorer",
    "Scored",
    "exact_match",
    "last_boxed",
    "last_number",
    "load_function",
    "number_match",
    "quick",
    "resolve_reward",
]
