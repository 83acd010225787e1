"""Reward of the arithmetic example: 1 for the right answer followed by the end token, else 0."""

from rl_rollout.rewards import RewardInput, quick


@quick
def reward(sample: RewardInput) -> float:
    """Return 1.0 if the response ended by itself and its final answer is the ground truth."""
    text = sample.response_text
    answer = text.rpartition(":")[2] if text.startswith(";") else text
    return float(sample.finish_reason == "stop" and answer == sample.ground_truth)
