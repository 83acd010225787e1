"""Distribution metrics: histograms over a step's tokens, trajectories and groups."""

from rl_metrics.definitions.definition import Metric, WeightedBy


def histogram(name: str, unit: str, meaning: str, *, of: WeightedBy) -> Metric:
    """Return a distribution over tokens, trajectories or groups."""
    return Metric(
        name=f"distribution/{name}",
        unit=unit,
        reduction="histogram",
        weighted_by=of,
        meaning=f"{meaning}, distribution.",
    )


DISTRIBUTIONS = (
    histogram("reward", "1", "Reward of a trajectory that has one", of="trajectory"),
    histogram(
        "group_reward_std",
        "1",
        "Standard deviation of the rewards within a group of two or more scored trajectories",
        of="group",
    ),
    histogram("advantage", "1", "Advantage of a trained token", of="token"),
    histogram("response_length", "tokens", "Tokens from the first sampled one to the end", of="trajectory"),
    histogram("prompt_length", "tokens", "Tokens before the first sampled one", of="trajectory"),
    histogram("entropy", "nats", "Entropy of the policy at a trained token", of="token"),
    histogram("logprob", "nats", "Logprob of a trained token, as returned by the engine", of="token"),
    histogram(
        "log_ratio", "nats", "Learner's minus engine's logprob of a trained token, before the update", of="token"
    ),
    histogram("correction_weight", "1", "Importance weight of a trained token, after its bounds", of="token"),
    histogram("generate_s", "s", "Generation time of a trajectory", of="trajectory"),
    histogram("tools_s", "s", "Tool time of a trajectory", of="trajectory"),
    histogram("reward_s", "s", "Reward time of a trajectory", of="trajectory"),
)
