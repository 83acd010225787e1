"""The reward of the agent example: 1 when the agent printed the right answer, else 0."""

from rl_rollout.rewards import RewardInput, quick


@quick
def reward(sample: RewardInput) -> float:
    """1.0 for the ground truth as the last line of a program that ended well."""
    run = sample.agent
    return float(run is not None and run.exit_code == 0 and run.stdout.strip() == sample.ground_truth)
