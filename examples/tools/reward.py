"""Reward of the tools example: 1 for the right answer in the last turn followed by the end token, else 0."""

from rl_rollout.rewards import RewardInput, quick


@quick
def reward(sample: RewardInput) -> float:
    """Return 1.0 if the session ended by itself and its last turn is the ground truth."""
    return float(sample.finish_reason == "stop" and sample.response_text == sample.ground_truth)
