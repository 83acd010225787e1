"""Metrics of the mismatch between engine and learner."""

from rl_metrics.definitions.definition import Band, Metric, WeightedBy
from rl_metrics.definitions.entries import THUMB, mean, one


def _rejection(*, stem: str, of: str, over: WeightedBy) -> tuple[Metric, ...]:
    """Return the metrics of one criterion for rejecting tokens or trajectories."""
    name = f"rollout_corr/rollout_rs_{{criterion}}_{stem}"
    side = "Share whose statistic is above (high) or below (low) the bound."
    return (
        mean(f"{name}masked_fraction", "1", f"Share rejected by the criterion, by {over}.", over=over),
        mean(f"{name}fraction_{{side}}", "1", side, over=over),
        mean(f"{name}mean", "nats", f"Statistic of {of}, mean.", over=over),
        one(f"{name}std", "nats", f"Statistic of {of}, standard deviation."),
        one(f"{name}max", "nats", f"Statistic of {of}, maximum.", reduction="max"),
        one(f"{name}min", "nats", f"Statistic of {of}, minimum.", reduction="min"),
    )


CORRECTION = (
    mean(
        "rollout_corr/kl",
        "nats",
        "k1 estimate of KL from the engine's policy to the learner's (mean of rollout minus old logprobs).",
        over="token",
        healthy=Band(low=-0.1, high=0.1, source=THUMB),
    ),
    mean(
        "rollout_corr/k3_kl",
        "nats",
        "k3 estimate of KL from the engine's policy to the learner's.",
        over="token",
        healthy=Band(high=0.1, source=THUMB),
    ),
    mean("rollout_corr/training_ppl", "1", "Perplexity of responses under the learner.", over="trajectory"),
    mean("rollout_corr/training_log_ppl", "nats", "Log perplexity of responses under the learner.", over="trajectory"),
    mean("rollout_corr/rollout_ppl", "1", "Perplexity of responses under the engine.", over="trajectory"),
    mean("rollout_corr/rollout_log_ppl", "nats", "Log perplexity of responses under the engine.", over="trajectory"),
    mean(
        "rollout_corr/log_ppl_diff", "nats", "Learner's minus engine's log perplexity of a response.", over="trajectory"
    ),
    mean(
        "rollout_corr/log_ppl_abs_diff",
        "nats",
        "Absolute difference of learner's and engine's log perplexity of a response.",
        over="trajectory",
    ),
    one("rollout_corr/log_ppl_diff_max", "nats", "Largest difference of log perplexities.", reduction="max"),
    one("rollout_corr/log_ppl_diff_min", "nats", "Smallest difference of log perplexities.", reduction="min"),
    mean(
        "rollout_corr/ppl_ratio",
        "1",
        "Learner's over engine's perplexity of a response.",
        over="trajectory",
        healthy=Band(low=0.9, high=1.1, source=THUMB),
    ),
    mean("rollout_corr/chi2_token", "1", "Chi-squared divergence by token: mean squared ratio minus 1.", over="token"),
    mean("rollout_corr/chi2_seq", "1", "Chi-squared divergence by complete response.", over="trajectory"),
    mean(
        "rollout_corr/rollout_is_mean",
        "1",
        "Importance weight of a trained token, mean.",
        over="token",
        healthy=Band(low=0.5, high=2.0, source=THUMB),
    ),
    one("rollout_corr/rollout_is_std", "1", "Importance weight, standard deviation."),
    one("rollout_corr/rollout_is_max", "1", "Importance weight, maximum.", reduction="max"),
    one("rollout_corr/rollout_is_min", "1", "Importance weight, minimum.", reduction="min"),
    mean(
        "rollout_corr/rollout_is_eff_sample_size",
        "1",
        "Effective share of the samples after weighting: 1 / mean of squared normalized weights.",
        over="step",
        healthy=Band(low=0.5, high=1.0, source=THUMB),
    ),
    mean("rollout_corr/rollout_is_ratio_fraction_high", "1", "Share of ratios above the upper bound.", over="token"),
    mean("rollout_corr/rollout_is_ratio_fraction_low", "1", "Share of ratios below the lower bound.", over="token"),
    mean("rollout_corr/rollout_is_oob_ratio", "1", "Share of tokens that a band weighted 0.", over="token"),
    mean("rollout_corr/rollout_is_seq_mean", "1", "A trajectory's mean importance weight, mean.", over="trajectory"),
    one("rollout_corr/rollout_is_seq_std", "1", "A trajectory's mean importance weight, standard deviation."),
    one("rollout_corr/rollout_is_seq_max", "1", "A trajectory's mean importance weight, maximum.", reduction="max"),
    one("rollout_corr/rollout_is_seq_min", "1", "A trajectory's mean importance weight, minimum.", reduction="min"),
    one(
        "rollout_corr/rollout_is_seq_max_deviation",
        "1",
        "Largest distance of a trajectory's mean weight from 1.",
        reduction="max",
    ),
    mean(
        "rollout_corr/rollout_is_seq_fraction_{side}",
        "1",
        "Share of trajectories whose mean ratio is above (high) or below (low) the bound.",
        over="trajectory",
    ),
    mean(
        "rollout_corr/rollout_rs_masked_fraction",
        "1",
        "Share of tokens that were rejected by any criterion.",
        over="token",
        healthy=Band(high=0.1, source=THUMB),
    ),
    mean(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "1",
        "Share of trajectories with a token that any criterion rejected.",
        over="trajectory",
    ),
    *_rejection(stem="seq_", of="a trajectory", over="trajectory"),  # before the other, because the first match wins
    one(
        "rollout_corr/rollout_rs_{criterion}_seq_max_deviation",
        "nats",
        "Largest distance of a trajectory's statistic from 0.",
        reduction="max",
    ),
    *_rejection(stem="", of="the judged token or trajectory", over="token"),
)
