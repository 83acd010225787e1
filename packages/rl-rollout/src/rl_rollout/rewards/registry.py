"""Reward functions by name, or from a file."""

import inspect
from typing import Any

from rl_core.registry import Registry
from rl_rollout.rewards.custom import check_callable, load_function
from rl_rollout.rewards.protocol import RewardFunction

REWARDS: Registry[Any] = Registry(
    "reward function",
    {
        "exact_match": "rl_rollout.rewards.rules:exact_match",
        "number_match": "rl_rollout.rewards.rules:number_match",
        "math_verify": "rl_rollout.rewards.math_verify:MathVerify",
    },
    group="rl_rollout.rewards",
)


def resolve_reward(reference: str) -> RewardFunction:
    """The reward function of a name, or of `path.py:function`; a class is made without arguments.

    Raises:
        SettingsError: There is no such name, file or function.
        MissingExtraError: It needs a library that is not installed.
    """
    if ":" in reference or reference.endswith(".py"):
        return load_function(reference)
    found = REWARDS.get(reference)
    return check_callable(found() if inspect.isclass(found) else found, name=reference)
