"""The one table of every metric of the project.

Names follow verl's where it has one, so that dashboards keep working.
"""

from rl_metrics.definitions import Band, Metric, MetricTable, Reduction, WeightedBy

GUIDE = "rule of thumb"
BY_DESIGN = "by definition"
PROOF = "weight proof in float32"


def _spread(
    stem: str, *, unit: str, meaning: str, over: WeightedBy, healthy_mean: Band | None = None
) -> tuple[Metric, ...]:
    mean = Metric(
        name=f"{stem}/mean",
        unit=unit,
        reduction="mean",
        weighted_by=over,
        meaning=f"{meaning}, mean.",
        healthy=healthy_mean,
    )
    high = Metric(name=f"{stem}/max", unit=unit, reduction="max", meaning=f"{meaning}, largest.")
    low = Metric(name=f"{stem}/min", unit=unit, reduction="min", meaning=f"{meaning}, smallest.")
    return mean, high, low


def _mean(name: str, unit: str, meaning: str, *, over: WeightedBy, healthy: Band | None = None) -> Metric:
    return Metric(name=name, unit=unit, reduction="mean", weighted_by=over, meaning=meaning, healthy=healthy)


def _one(name: str, unit: str, meaning: str, *, reduction: Reduction = "last", healthy: Band | None = None) -> Metric:
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, healthy=healthy)


def _seconds(phase: str, meaning: str) -> Metric:
    return _one(f"timing_s/{phase}", "s", f"{meaning}; the time of all its parts in the step.", reduction="sum")


TRAINING = (
    _one("training/global_step", "steps", "Optimizer steps of the policy done so far."),
    _one("training/policy_version", "versions", "Weight updates published to the engines so far."),
    _one("training/epoch", "epochs", "Passes over the prompts, the running one included, counted from 0."),
    *_spread(
        "training/staleness",
        unit="versions",
        meaning="Learner's policy version minus the oldest in the trajectory",
        over="trajectory",
    ),
    _mean(
        "training/rollout_probs_diff_mean",
        "1",
        "Absolute difference of learner's and engine's probability of a sampled token, mean.",
        over="token",
        healthy=Band(high=0.01, source=GUIDE),
    ),
    _one(
        "training/rollout_probs_diff_max", "1", "Largest absolute difference of those probabilities.", reduction="max"
    ),
    _one("training/rollout_probs_diff_std", "1", "Sample standard deviation of that absolute difference."),
    _one(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "Correlation of learner's and engine's probabilities of the sampled tokens.",
        healthy=Band(low=0.99, high=1.0, source=GUIDE),
    ),
)

ACTOR = (
    _mean("actor/loss", "1", "The whole objective over the global batch.", over="step"),
    _mean("actor/pg_loss", "1", "Policy-gradient part of the objective.", over="token"),
    _mean(
        "actor/pg_clipfrac",
        "1",
        "Share of trained tokens whose ratio was clipped by the PPO band.",
        over="token",
        healthy=Band(high=0.2, source=GUIDE),
    ),
    _mean(
        "actor/pg_clipfrac_lower",
        "1",
        "Share of trained tokens clipped by the dual clip (negative advantage, large ratio).",
        over="token",
        healthy=Band(high=0.1, source=GUIDE),
    ),
    _mean(
        "actor/ppo_kl",
        "nats",
        "k1 estimate of KL from the old policy to the trained one (mean of old minus new logprobs).",
        over="token",
        healthy=Band(low=-0.03, high=0.03, source=GUIDE),
    ),
    _mean("actor/entropy", "nats", "Entropy of the policy at trained tokens.", over="token"),
    _mean(
        "actor/kl_loss",
        "nats",
        "KL of the policy to the frozen reference, before its coefficient.",
        over="token",
        healthy=Band(high=0.03, source=GUIDE),
    ),
    _one("actor/kl_coef", "1", "Coefficient of the KL to the reference."),
    _mean(
        "actor/grad_norm",
        "1",
        "Global gradient norm before clipping.",
        over="step",
        healthy=Band(high=1.0, source=GUIDE),
    ),
    _one("actor/lr", "1", "Learning rate of the step."),
    _mean("sft/loss", "nats", "Cross entropy of the warm start's demonstrations.", over="token"),
    _mean("sft/token_accuracy", "1", "Share of demonstration tokens that were the likeliest.", over="token"),
    _mean("sft/grad_norm", "1", "Global gradient norm of the warm start before clipping.", over="step"),
    _one("sft/lr", "1", "Learning rate of the warm start."),
    _one("sft/num_tokens", "tokens", "Demonstration tokens that trained.", reduction="sum"),
    _mean("sft/throughput", "tokens/s", "Demonstration tokens a second.", over="step"),
)

CRITIC = (
    *_spread(
        "critic/score", unit="1", meaning="Reward of a trajectory as the reward function gave it", over="trajectory"
    ),
    *_spread(
        "critic/rewards", unit="1", meaning="Reward of a trajectory after penalties in the reward", over="trajectory"
    ),
    *_spread(
        "critic/advantages",
        unit="1",
        meaning="Advantage of a trained token",
        over="token",
        healthy_mean=Band(low=-0.5, high=0.5, source=GUIDE),
    ),
    *_spread("critic/returns", unit="1", meaning="Return of a trained token", over="token"),
    *_spread("critic/values", unit="1", meaning="The critic's value of a trained token", over="token"),
    *_spread("reward/{component}", unit="1", meaning="One named component of the reward", over="trajectory"),
)

ROLLOUT = (
    *_spread(
        "response_length", unit="tokens", meaning="Tokens from the first sampled one to the end", over="trajectory"
    ),
    _mean(
        "response_length/clip_ratio",
        "1",
        "Share of responses cut at the length limit.",
        over="trajectory",
        healthy=Band(high=0.1, source=GUIDE),
    ),
    *_spread("prompt_length", unit="tokens", meaning="Tokens before the first sampled one", over="trajectory"),
    _mean("prompt_length/clip_ratio", "1", "Share of prompts as long as the limit.", over="trajectory"),
    _mean(
        "response/aborted_ratio",
        "1",
        "Share of trajectories in which nothing trains.",
        over="trajectory",
        healthy=Band(high=0.1, source=GUIDE),
    ),
    _one("rollout/num_groups", "groups", "Prompts in the batch.", reduction="sum"),
    _one("rollout/num_trajectories", "trajectories", "Trajectories in the batch.", reduction="sum"),
    _one(
        "rollout/unscored_trajectories",
        "trajectories",
        "Trajectories without a reward; they count in no reward metric.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    _one(
        "rollout/failed_sessions",
        "sessions",
        "Sessions that ended with an error, and gave no trajectory.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    _mean(
        "rollout/positive_reward_ratio", "1", "Share of scored trajectories with a reward above 0.", over="trajectory"
    ),
    _mean(
        "rollout/groups_without_spread_ratio",
        "1",
        "Share of groups whose rewards are all equal; such a group teaches nothing.",
        over="group",
        healthy=Band(high=0.9, source=GUIDE),
    ),
    _mean("rollout/group_reward_std", "1", "Standard deviation of the rewards within a group.", over="group"),
    *(
        metric
        for name, unit, meaning in (
            ("generate_sequences", "s", "Time that a trajectory's generation took"),
            ("tool_calls", "s", "Time that a trajectory's tools took"),
            ("compute_score", "s", "Time that a trajectory's reward took"),
            ("num_preempted", "times", "How often the engine started a trajectory's requests again"),
        )
        for metric in _spread(f"agent_loop/{name}", unit=unit, meaning=meaning, over="trajectory")
    ),
    _one(
        "agent_loop/slowest/generate_sequences", "s", "Generation of the slowest trajectory (generate + tools + score)."
    ),
    _one("agent_loop/slowest/tool_calls", "s", "Tools of the slowest trajectory."),
    _one("agent_loop/slowest/compute_score", "s", "Reward of the slowest trajectory."),
    _one("agent_loop/slowest/num_preempted", "times", "Preemptions of the slowest trajectory."),
    _one("agent_loop/slowest/prompt_length", "tokens", "Prompt length of the slowest trajectory."),
    _one("agent_loop/slowest/response_length", "tokens", "Response length of the slowest trajectory."),
)

CORRECTION = (
    _mean(
        "rollout_corr/kl",
        "nats",
        "k1 estimate of KL from the engine's policy to the learner's (mean of rollout minus old logprobs).",
        over="token",
        healthy=Band(low=-0.1, high=0.1, source=GUIDE),
    ),
    _mean(
        "rollout_corr/k3_kl",
        "nats",
        "k3 estimate of KL from the engine's policy to the learner's.",
        over="token",
        healthy=Band(high=0.1, source=GUIDE),
    ),
    _mean("rollout_corr/training_ppl", "1", "Perplexity of responses under the learner.", over="trajectory"),
    _mean("rollout_corr/training_log_ppl", "nats", "Log perplexity of responses under the learner.", over="trajectory"),
    _mean("rollout_corr/rollout_ppl", "1", "Perplexity of responses under the engine.", over="trajectory"),
    _mean("rollout_corr/rollout_log_ppl", "nats", "Log perplexity of responses under the engine.", over="trajectory"),
    _mean(
        "rollout_corr/log_ppl_diff", "nats", "Learner's minus engine's log perplexity of a response.", over="trajectory"
    ),
    _mean(
        "rollout_corr/log_ppl_abs_diff",
        "nats",
        "Absolute difference of learner's and engine's log perplexity of a response.",
        over="trajectory",
    ),
    _one("rollout_corr/log_ppl_diff_max", "nats", "Largest difference of log perplexities.", reduction="max"),
    _one("rollout_corr/log_ppl_diff_min", "nats", "Smallest difference of log perplexities.", reduction="min"),
    _mean(
        "rollout_corr/ppl_ratio",
        "1",
        "Learner's over engine's perplexity of a response.",
        over="trajectory",
        healthy=Band(low=0.9, high=1.1, source=GUIDE),
    ),
    _mean("rollout_corr/chi2_token", "1", "Chi-squared divergence by token: mean squared ratio minus 1.", over="token"),
    _mean("rollout_corr/chi2_seq", "1", "Chi-squared divergence by whole response.", over="trajectory"),
    _mean(
        "rollout_corr/rollout_is_mean",
        "1",
        "Importance weight of a trained token, mean.",
        over="token",
        healthy=Band(low=0.5, high=2.0, source=GUIDE),
    ),
    _one("rollout_corr/rollout_is_std", "1", "Importance weight, standard deviation."),
    _one("rollout_corr/rollout_is_max", "1", "Importance weight, largest.", reduction="max"),
    _one("rollout_corr/rollout_is_min", "1", "Importance weight, smallest.", reduction="min"),
    _mean(
        "rollout_corr/rollout_is_eff_sample_size",
        "1",
        "Effective share of the samples after weighting: 1 / mean of squared normalised weights.",
        over="step",
        healthy=Band(low=0.5, high=1.0, source=GUIDE),
    ),
    _mean("rollout_corr/rollout_is_ratio_fraction_high", "1", "Share of ratios above the upper bound.", over="token"),
    _mean("rollout_corr/rollout_is_ratio_fraction_low", "1", "Share of ratios below the lower bound.", over="token"),
)

WEIGHTS = (
    _one(
        "weights/canary_max_diff",
        "nats",
        "Largest difference of engine's and learner's logprobs on the canary after an update.",
        reduction="max",
        healthy=Band(high=1e-3, source=PROOF),
    ),
    _one(
        "weights/probe_max_diff",
        "1",
        "Largest relative difference of a live tensor's probe from the learner's.",
        reduction="max",
        healthy=Band(high=1e-3, source=PROOF),
    ),
    _one("weights/num_tensors", "tensors", "Tensors published in an update."),
    _one("weights/size_gb", "GiB", "Bytes published in an update."),
)

QUEUE = (
    _one(
        "queue/groups/{state}", "groups", "Groups in this state (issued, settled, done, dropped) in the transfer queue."
    ),
    _one("queue/rows", "rows", "Rows that the queue holds."),
    _one(
        "queue/rows/{state}", "rows", "Of these, rows of groups in this state; also leased, and reserved to be written."
    ),
    _one("queue/size_bytes", "bytes", "Memory that the queue's rows take."),
    _one("queue/size_bytes/{state}", "bytes", "Of this, the part of groups in this state; also leased, and reserved."),
    _one("queue/leases", "leases", "Leases that run now."),
    _one("queue/claims", "claims", "Claims of producers that run now."),
    _one("queue/oldest_lease_s", "s", "Age of the oldest lease that runs now."),
    _one("queue/oldest_issued_s", "s", "Age of the oldest group whose sessions are not all settled."),
    _one("queue/waiting/{kind}", "requests", "Requests that wait now: put for room, lease for groups."),
    _one("queue/waited_s/{kind}", "s", "Time that answered requests of this kind have waited so far."),
    _one("queue/leases_expired", "leases", "Leases and claims that ran out so far."),
    _one("queue/reissued", "groups", "Groups issued again so far."),
    _one("queue/sessions_left_out", "sessions", "Sessions that no task waited for any longer, so far."),
    _one("queue/acks/{task}", "groups", "Groups that this task has acked so far."),
    _one("queue/drops/{reason}", "groups", "Groups dropped for this reason so far."),
)

TIMING = (
    _seconds("step", "One whole step"),
    _seconds("gen", "Generation, with agent loops"),
    _seconds("reward", "Rewards outside the agent loops"),
    _seconds("old_log_prob", "The learner's logprobs before the update"),
    _seconds("ref", "Logprobs of the frozen reference"),
    _seconds("values", "The critic's values"),
    _seconds("adv", "Advantages, correction weights and loss weights"),
    _seconds("update_actor", "Forward, backward and optimizer step of the policy"),
    _seconds("update_critic", "Forward, backward and optimizer step of the critic"),
    _seconds("update_weights", "Publishing weights to the engines, proof included"),
    _seconds("testing", "Validation"),
    _seconds("save_checkpoint", "Writing a checkpoint"),
    _seconds("dump_rollout_generations", "Writing the step's generations"),
    _one("perf/total_num_tokens", "tokens", "Prompt and response tokens of the batch.", reduction="sum"),
    _one("perf/time_per_step", "s", "Time of one whole step.", reduction="max"),
    _one("perf/throughput", "tokens/s", "Prompt and response tokens a second and device."),
    _one("perf/samples_per_s", "trajectories/s", "Trajectories trained a second."),
    _one("perf/cpu_memory_used_gb", "GiB", "Memory in use on the host.", reduction="max"),
    _one("perf/process_memory_gb", "GiB", "Resident memory of the process.", reduction="max"),
    _one("perf/max_memory_allocated_gb", "GiB", "Largest memory that torch held on the device.", reduction="max"),
    _one("perf/max_memory_reserved_gb", "GiB", "Largest memory that torch reserved on the device.", reduction="max"),
)

VALIDATION = (
    _mean(
        "val-core/{source}/{variable}/mean@{n}",
        "1",
        "The source's main variable (acc, else reward): mean over a prompt's n responses, then over prompts.",
        over="prompt",
    ),
    _mean(
        "val-aux/{source}/{variable}/mean@{n}",
        "1",
        "Any other variable: mean over a prompt's n responses, then over prompts.",
        over="prompt",
    ),
    _mean(
        "val-aux/{source}/{variable}/std@{n}",
        "1",
        "Standard deviation over a prompt's n responses, mean over prompts.",
        over="prompt",
    ),
    _one(
        "val-aux/{source}/{variable}/num_missing",
        "responses",
        "Responses without this variable; they count in no other metric of it.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    _one("val-aux/{source}/num_prompts", "prompts", "Validation prompts of the source.", reduction="sum"),
    _one("val-aux/{source}/num_responses", "responses", "Validation responses of the source.", reduction="sum"),
)

RECORDING = (
    _one(
        "nonfinite/{metric}",
        "values",
        "NaN or infinite values that were recorded for the metric, and left out of it.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
)

FAMILIES: dict[str, tuple[Metric, ...]] = {
    "Training": TRAINING,
    "Policy": ACTOR,
    "Rewards and advantages": CRITIC,
    "Rollouts": ROLLOUT,
    "Mismatch of engine and learner": CORRECTION,
    "Weights": WEIGHTS,
    "Queue": QUEUE,
    "Time and memory": TIMING,
    "Validation": VALIDATION,
    "Recording": RECORDING,
}
"""Metrics by chapter, as the docs show them."""

DEFINITIONS = MetricTable(metric for family in FAMILIES.values() for metric in family)
"""Every metric of the project."""
