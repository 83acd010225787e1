"""Reward of the agent example: 1 if the agent printed the right answer, else 0."""

from rl_rollout.rewards import RewardInput, quick


@quick
def reward(sample: RewardInput) -> float:
    """Return 1.0 if the program succeeded and printed exactly the ground truth."""
    run = sample.agent
    return float(run is not None and run.exit_code == 0 and run.stdout.strip() == sample.ground_truth)
