"""Reward of the images example: 1 for the right number followed by the end token, else 0."""

from rl_rollout.rewards import RewardInput, quick


@quick
def reward(sample: RewardInput) -> float:
    """Return 1.0 if the response ended by itself and its final answer, after the last colon, is the ground truth."""
    answer = sample.response_text.rpartition(":")[2]
    return float(sample.finish_reason == "stop" and answer == sample.ground_truth)
