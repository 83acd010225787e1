"""The reward of this run: 1 when the last number of the response is the answer, else 0."""

import re

from rl_rollout.rewards import RewardInput

NUMBER = re.compile(r"-?\d+")


def reward(given: RewardInput) -> float:
    """Score one response; `given.columns` is the whole row of the data file."""
    numbers = NUMBER.findall(given.response_text)
    return float(bool(numbers) and numbers[-1] == str(given.ground_truth))
