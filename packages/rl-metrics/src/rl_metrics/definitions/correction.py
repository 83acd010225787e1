"""Metrics of the mismatch between engine and learner."""

from rl_metrics.definitions.definition import Band, Metric, WeightedBy
from rl_metrics.definitions.entries import (
    at_most,
    between,
    highest,
    lowest,
    mean,
    newest,
    step_mean,
    token_mean,
    trajectory_mean,
)


def _rejection(*, stem: str, of: str, over: WeightedBy) -> tuple[Metric, ...]:
    """Return the metrics of one criterion for rejecting tokens or trajectories."""
    name = f"rollout_corr/rollout_rs_{{criterion}}_{stem}"
    side = "Share whose statistic is above (high) or below (low) the bound."
    return (
        mean(f"{name}masked_fraction", f"Share rejected by the criterion, by {over}.", over=over),
        mean(f"{name}fraction_{{side}}", side, over=over),
        mean(f"{name}mean", f"Statistic of {of}, mean.", "nats", over=over),
        newest(f"{name}std", f"Statistic of {of}, standard deviation.", "nats"),
        highest(f"{name}max", f"Statistic of {of}, maximum.", "nats"),
        lowest(f"{name}min", f"Statistic of {of}, minimum.", "nats"),
    )


def _sampled(name: str, meaning: str, *, healthy: Band) -> tuple[Metric, ...]:
    """Return a mismatch with and without replay, on a sample of a step's trajectories before its update."""
    sample = "on a sample of trajectories"
    return (
        token_mean(
            f"router/{name}/replay", f"{meaning}, with the engine's experts, {sample}.", "nats", healthy=healthy
        ),
        token_mean(f"router/{name}/no_replay", f"{meaning}, with the learner's own experts, {sample}.", "nats"),
    )


CORRECTION = (
    token_mean(
        "rollout_corr/kl",
        "k1 estimate of KL from the engine's policy to the learner's (mean of rollout minus old logprobs).",
        "nats",
        healthy=between(-0.1, 0.1),
    ),
    token_mean(
        "rollout_corr/k3_kl",
        "k3 estimate of KL from the engine's policy to the learner's.",
        "nats",
        healthy=at_most(0.1),
    ),
    trajectory_mean("rollout_corr/training_ppl", "Perplexity of responses under the learner."),
    trajectory_mean("rollout_corr/training_log_ppl", "Log perplexity of responses under the learner.", "nats"),
    trajectory_mean("rollout_corr/rollout_ppl", "Perplexity of responses under the engine."),
    trajectory_mean("rollout_corr/rollout_log_ppl", "Log perplexity of responses under the engine.", "nats"),
    trajectory_mean("rollout_corr/log_ppl_diff", "Learner's minus engine's log perplexity of a response.", "nats"),
    trajectory_mean(
        "rollout_corr/log_ppl_abs_diff",
        "Absolute difference of learner's and engine's log perplexity of a response.",
        "nats",
    ),
    highest("rollout_corr/log_ppl_diff_max", "Largest difference of log perplexities.", "nats"),
    lowest("rollout_corr/log_ppl_diff_min", "Smallest difference of log perplexities.", "nats"),
    trajectory_mean(
        "rollout_corr/ppl_ratio", "Learner's over engine's perplexity of a response.", healthy=between(0.9, 1.1)
    ),
    token_mean("rollout_corr/chi2_token", "Chi-squared divergence by token: mean squared ratio minus 1."),
    trajectory_mean("rollout_corr/chi2_seq", "Chi-squared divergence by complete response."),
    token_mean(
        "rollout_corr/rollout_is_mean", "Importance weight of a trained token, mean.", healthy=between(0.5, 2.0)
    ),
    newest("rollout_corr/rollout_is_std", "Importance weight, standard deviation."),
    highest("rollout_corr/rollout_is_max", "Importance weight, maximum."),
    lowest("rollout_corr/rollout_is_min", "Importance weight, minimum."),
    step_mean(
        "rollout_corr/rollout_is_eff_sample_size",
        "Effective share of the samples after weighting: 1 / mean of squared normalized weights.",
        healthy=between(0.5, 1.0),
    ),
    token_mean("rollout_corr/rollout_is_ratio_fraction_high", "Share of ratios above the upper bound."),
    token_mean("rollout_corr/rollout_is_ratio_fraction_low", "Share of ratios below the lower bound."),
    token_mean("rollout_corr/rollout_is_oob_ratio", "Share of tokens that a band weighted 0."),
    trajectory_mean("rollout_corr/rollout_is_seq_mean", "A trajectory's mean importance weight, mean."),
    newest("rollout_corr/rollout_is_seq_std", "A trajectory's mean importance weight, standard deviation."),
    highest("rollout_corr/rollout_is_seq_max", "A trajectory's mean importance weight, maximum."),
    lowest("rollout_corr/rollout_is_seq_min", "A trajectory's mean importance weight, minimum."),
    highest("rollout_corr/rollout_is_seq_max_deviation", "Largest distance of a trajectory's mean weight from 1."),
    trajectory_mean(
        "rollout_corr/rollout_is_seq_fraction_{side}",
        "Share of trajectories whose mean ratio is above (high) or below (low) the bound.",
    ),
    token_mean(
        "rollout_corr/rollout_rs_masked_fraction",
        "Share of tokens that were rejected by any criterion.",
        healthy=at_most(0.1),
    ),
    trajectory_mean(
        "rollout_corr/rollout_rs_seq_masked_fraction", "Share of trajectories with a token that any criterion rejected."
    ),
    *_rejection(stem="seq_", of="a trajectory", over="trajectory"),  # before the other, because the first match wins
    highest(
        "rollout_corr/rollout_rs_{criterion}_seq_max_deviation",
        "Largest distance of a trajectory's statistic from 0.",
        "nats",
    ),
    *_rejection(stem="", of="the judged token or trajectory", over="token"),
)

MIXTURES = (
    token_mean(
        "router/rerouted_share",
        "Share of rows (a token in one layer of a mixture) for which the learner's router would choose other experts "
        "than the replayed ones of the engine.",
        healthy=at_most(0.1),
    ),
    token_mean(
        "router/unknown_share",
        "Share of computed tokens whose experts the engine did not report; tokens from a trajectory's last trained one "
        "on are not counted.",
        healthy=at_most(0.01),
    ),
    *_sampled("k3_kl", "k3 estimate of KL from the engine's policy to the learner's", healthy=at_most(0.1)),
    *_sampled(
        "logprobs_diff_mean",
        "Absolute difference of learner's and engine's logprob of a sampled token, mean",
        healthy=at_most(0.1),
    ),
)
