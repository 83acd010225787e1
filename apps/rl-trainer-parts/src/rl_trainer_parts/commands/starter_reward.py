"""The reward of this run: 1 when the last number of the response is the answer, else 0."""

from rl_rollout.rewards import RewardInput, last_number


def reward(given: RewardInput) -> float:
    """Score one response; `given.columns` is the whole row of the data file."""
    number = last_number(given.final_text)
    return float(number is not None and number == last_number(str(given.ground_truth)))
