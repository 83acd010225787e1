"""Metrics of mixtures of experts: router replay and its benefit."""

from rl_metrics.definitions.definition import Band, Metric
from rl_metrics.definitions.entries import THUMB, mean


def _sampled(name: str, meaning: str, *, healthy: Band) -> tuple[Metric, ...]:
    """Return a mismatch with and without replay, on a sample of a step's trajectories before its update."""
    sample = "on a sample of trajectories"
    return (
        mean(
            f"router/{name}/replay",
            "nats",
            f"{meaning}, with the engine's experts, {sample}.",
            over="token",
            healthy=healthy,
        ),
        mean(f"router/{name}/no_replay", "nats", f"{meaning}, with the learner's own experts, {sample}.", over="token"),
    )


MIXTURES = (
    mean(
        "router/rerouted_share",
        "1",
        "Share of rows (a token in one layer of a mixture) for which the learner's router would choose other experts "
        "than the replayed ones of the engine.",
        over="token",
        healthy=Band(high=0.1, source=THUMB),
    ),
    mean(
        "router/unknown_share",
        "1",
        "Share of computed tokens whose experts the engine did not report; tokens from a trajectory's last trained one "
        "on are not counted.",
        over="token",
        healthy=Band(high=0.01, source=THUMB),
    ),
    *_sampled(
        "k3_kl",
        "k3 estimate of KL from the engine's policy to the learner's",
        healthy=Band(high=0.1, source=THUMB),
    ),
    *_sampled(
        "logprobs_diff_mean",
        "Absolute difference of learner's and engine's logprob of a sampled token, mean",
        healthy=Band(high=0.1, source=THUMB),
    ),
)
