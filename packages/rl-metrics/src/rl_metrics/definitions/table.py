"""The table of all metrics.

Names follow verl's where they exist, so that dashboards keep working.
"""

from rl_metrics.definitions.async_training import ASYNC
from rl_metrics.definitions.correction import CORRECTION, MIXTURES
from rl_metrics.definitions.definition import Band, Metric, MetricTable
from rl_metrics.definitions.distillation import DISTILLATION
from rl_metrics.definitions.entries import (
    ADVANTAGES_MEAN,
    ENTROPY,
    GRAD_NORM,
    KL_TO_REFERENCE,
    POLICY_LOSS,
    PROOF,
    STEP_KL,
    ZERO,
    at_most,
    between,
    group_mean,
    highest,
    histogram,
    newest,
    spread,
    step_mean,
    token_mean,
    total,
    trajectory_mean,
)
from rl_metrics.definitions.gateway import GATEWAY
from rl_metrics.definitions.service import SERVICE
from rl_metrics.definitions.timing import MEMORY, TIMING
from rl_metrics.definitions.validation import VALIDATION

TRAINING = (
    newest("training/global_step", "Optimizer steps of the policy done so far.", "steps"),
    newest("training/policy_version", "Weight updates published to the engines so far.", "versions"),
    newest("training/epoch", "Current pass over the prompts, counted from 0.", "epochs"),
    *spread(
        "training/staleness",
        "Learner's policy version minus the oldest in the trajectory",
        "versions",
        over="trajectory",
    ),
    token_mean(
        "training/rollout_probs_diff_mean",
        "Absolute difference of learner's and engine's probability of a sampled token, mean.",
        healthy=at_most(0.01),
    ),
    highest("training/rollout_probs_diff_max", "Largest absolute difference of those probabilities."),
    newest("training/rollout_probs_diff_std", "Sample standard deviation of that absolute difference."),
    token_mean(
        "training/rollout_logprobs_diff_mean",
        "Absolute difference of learner's and engine's logprob of a sampled token, mean; in TRL's runs.",
        "nats",
        healthy=at_most(0.1),
    ),
    highest(
        "training/rollout_logprobs_diff_max", "Largest absolute difference of those logprobs; in TRL's runs.", "nats"
    ),
    newest(
        "training/rollout_actor_probs_pearson_corr",
        "Correlation of learner's and engine's probabilities of the sampled tokens.",
        healthy=between(0.99, 1.0),
    ),
)

ACTOR = (
    step_mean("actor/loss", "The whole objective over the global batch."),
    token_mean("actor/pg_loss", "Policy-gradient part of the objective.", healthy=POLICY_LOSS),
    token_mean(
        "actor/pg_clipfrac", "Share of trained tokens whose ratio was clipped by the PPO band.", healthy=at_most(0.2)
    ),
    token_mean(
        "actor/pg_clipfrac_lower",
        "Share of trained tokens clipped by the dual clip (negative advantage, large ratio).",
        healthy=at_most(0.1),
    ),
    token_mean(
        "actor/ppo_kl",
        "k1 estimate of KL from the old policy to the trained one (mean of old minus new logprobs).",
        "nats",
        healthy=STEP_KL,
    ),
    token_mean("actor/entropy", "Entropy of the policy at trained tokens.", "nats", healthy=ENTROPY),
    token_mean(
        "actor/kl_loss",
        "KL of the policy to the frozen reference, before its coefficient.",
        "nats",
        healthy=KL_TO_REFERENCE,
    ),
    newest("actor/kl_coef", "Coefficient of the KL to the reference."),
    newest("actor/reference_kl", "KL of the sampling policy to the frozen reference.", "nats", healthy=KL_TO_REFERENCE),
    token_mean("actor/selected_fraction", "Share of trained tokens selected by Clip-Cov or KL-Cov."),
    step_mean("actor/grad_norm", "Global gradient norm before clipping.", healthy=GRAD_NORM),
    newest("actor/lr", "Learning rate of the step."),
    total("actor/skipped_updates", "Updates skipped because loss or gradients were not finite.", "updates"),
    token_mean("sft/loss", "Cross entropy of the trained tokens of demonstrations, in supervised training.", "nats"),
    step_mean("sft/grad_norm", "Global gradient norm of supervised training before clipping."),
    newest("sft/lr", "Learning rate of supervised training."),
    token_mean("sft/validation_loss", "Cross entropy of the trained tokens of validation demonstrations.", "nats"),
    newest("sft/validation_perplexity", "Perplexity of these tokens: the exponential of that cross entropy."),
)

CRITIC = (
    *spread("critic/score", "Reward of a trajectory, as returned by the reward function", over="trajectory"),
    *spread("critic/rewards", "Reward of a trajectory after penalties", over="trajectory"),
    *spread("critic/advantages", "Advantage of a trained token", over="token", healthy_mean=ADVANTAGES_MEAN),
    *spread("critic/returns", "Return of a trained token", over="token"),
    *spread("critic/values", "The critic's value of a trained token", over="token"),
    token_mean("critic/vf_loss", "The critic's loss: half the squared error to the returns, clipped."),
    token_mean("critic/vf_clipfrac", "Share of trained tokens whose value was clipped.", healthy=at_most(0.2)),
    token_mean("critic/vpred_mean", "Value of a trained token, computed by the critic during its update."),
    newest("critic/grad_norm", "Global norm of the critic's gradients before clipping."),
    newest("critic/lr", "Learning rate of the critic's step."),
    total(
        "critic/skipped_updates", "Updates of the critic skipped because loss or gradients were not finite.", "updates"
    ),
    *spread("reward/{component}", "One named component of the reward", over="trajectory"),
)

ROLLOUT = (
    *spread("response_length", "Tokens from the first sampled one to the end", "tokens", over="trajectory"),
    trajectory_mean("response_length/clip_ratio", "Share of responses cut at the length limit.", healthy=at_most(0.1)),
    *spread("prompt_length", "Tokens before the first sampled one", "tokens", over="trajectory"),
    *spread(
        "num_turns",
        "Turns of a trajectory: the prompt, the policy's responses, and the answers of tools or environments",
        "turns",
        over="trajectory",
    ),
    trajectory_mean("prompt_length/clip_ratio", "Share of prompts at the length limit."),
    trajectory_mean("response/aborted_ratio", "Share of trajectories without a trained token.", healthy=at_most(0.1)),
    trajectory_mean(
        "response/masked_ratio",
        "Share of trajectories that did not train because a limit ended their session (rollout.mask_truncated).",
    ),
    total("rollout/num_groups", "Prompts in the batch.", "groups"),
    total("rollout/num_trajectories", "Trajectories in the batch.", "trajectories"),
    total(
        "rollout/unscored_trajectories",
        "Trajectories without a reward; reward metrics ignore them.",
        "trajectories",
        healthy=ZERO,
    ),
    total("rollout/audited_sessions", "Sessions whose tokens were compared with the engine's.", "sessions"),
    total(
        "rollout/audit_failures",
        "Audited sessions that failed: a token was not sampled by the engine, or not in this context.",
        "sessions",
        healthy=ZERO,
    ),
    total(
        "rollout/rescored_sessions",
        "Sessions that the engine scored again with the weights that sampled them.",
        "sessions",
    ),
    total(
        "rollout/rescored_skipped",
        "Sessions selected for this but not scored again: sampled by several versions, or new weights had arrived.",
        "sessions",
    ),
    token_mean(
        "rollout/rescored_diff_mean",
        "Absolute difference of a token's logprob when sampled and when scored again, mean.",
        "nats",
        healthy=at_most(0.1),
    ),
    highest("rollout/rescored_diff_max", "Largest of those differences.", "nats"),
    group_mean("rollout/replayed", "Share of a step's groups that came from a skip cache; 1 if nothing was generated."),
    total("rollout/num_rounds", "Rounds of generation in a step, if groups are refilled.", "rounds"),
    group_mean("rollout/greedy_reward", "Reward of the greedy session of a prompt, the baseline of ReMax."),
    total("rollout/refused_groups", "Groups refused by the filter.", "groups"),
    total("rollout/made_up_groups", "Refused groups that trained because rounds ran out.", "groups"),
    total(
        "rollout/failed_sessions",
        "Sessions that ended with an error and without a trajectory.",
        "sessions",
        healthy=ZERO,
    ),
    total(
        "rollout/failed_rewards",
        "Sessions whose reward function raised, timed out, or returned no number; they fail, or count 0.",
        "sessions",
        healthy=ZERO,
    ),
    trajectory_mean("rollout/positive_reward_ratio", "Share of scored trajectories with a reward above 0."),
    group_mean(
        "rollout/groups_without_spread_ratio",
        "Share of groups whose rewards are all equal; their advantages are 0.",
        healthy=at_most(0.9),
    ),
    group_mean("rollout/group_reward_std", "Standard deviation of the rewards within a group."),
    *(
        metric
        for name, unit, meaning in (
            ("generate_sequences", "s", "Generation time of a trajectory"),
            ("tool_calls", "s", "Tool time of a trajectory"),
            ("compute_score", "s", "Reward time of a trajectory, including those whose reward failed"),
            ("num_preempted", "times", "Preemptions of a trajectory's requests in the engine"),
        )
        for metric in spread(f"agent_loop/{name}", meaning, unit, over="trajectory")
    ),
    newest(
        "agent_loop/slowest/generate_sequences", "Generation of the slowest trajectory (generate + tools + score).", "s"
    ),
    newest("agent_loop/slowest/tool_calls", "Tools of the slowest trajectory.", "s"),
    newest("agent_loop/slowest/compute_score", "Reward of the slowest trajectory.", "s"),
    newest("agent_loop/slowest/num_preempted", "Preemptions of the slowest trajectory.", "times"),
    newest("agent_loop/slowest/prompt_length", "Prompt length of the slowest trajectory.", "tokens"),
    newest("agent_loop/slowest/response_length", "Response length of the slowest trajectory.", "tokens"),
    total(
        "tools/calls/{outcome}",
        "Tool calls of the loop `tools` by outcome: ok, truncated, or an error that the model reads, such as "
        "malformed_call, unknown_tool, bad_arguments or timed_out.",
        "calls",
    ),
    newest("tools/ok_share", "Share of tool calls that returned a result, ok or truncated."),
)

WEIGHTS = (
    highest(
        "weights/canary_max_diff",
        "Largest difference of engine's and learner's logprobs on the canary after an update.",
        "nats",
        healthy=Band(high=1e-3, source=PROOF),
    ),
    highest(
        "weights/probe_max_diff",
        "Largest relative difference of a live tensor's probe from the learner's.",
        healthy=Band(high=1e-3, source=PROOF),
    ),
    newest("weights/num_tensors", "Tensors published in an update.", "tensors"),
    newest("weights/size_gb", "Bytes published in an update.", "GiB"),
)

QUEUE = (
    newest(
        "queue/groups/{state}", "Groups in this state (issued, settled, done, dropped) in the transfer queue.", "groups"
    ),
    newest("queue/rows", "Rows in the queue.", "rows"),
    newest(
        "queue/rows/{state}",
        "Of these, rows of groups in this state; also leased rows, and rows reserved for writing.",
        "rows",
    ),
    newest("queue/size_bytes", "Memory of the queue's rows.", "bytes"),
    newest(
        "queue/size_bytes/{state}",
        "Of this, the memory of groups in this state; also of leased and reserved rows.",
        "bytes",
    ),
    newest("queue/leases", "Current leases.", "leases"),
    newest("queue/claims", "Current claims of producers.", "claims"),
    newest("queue/oldest_lease_s", "Age of the oldest current lease.", "s"),
    newest("queue/oldest_issued_s", "Age of the oldest group with an unfinished session.", "s"),
    newest("queue/waiting/{kind}", "Waiting requests: put for capacity, lease for groups.", "requests"),
    newest("queue/waited_s/{kind}", "Total time that answered requests of this kind waited so far.", "s"),
    newest("queue/leases_expired", "Leases and claims that expired so far.", "leases"),
    newest("queue/reissued", "Groups issued again so far.", "groups"),
    newest("queue/acks/{task}", "Groups acked by this task so far.", "groups"),
    newest("queue/drops/{reason}", "Groups dropped for this reason so far.", "groups"),
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

RECORDING = (
    total(
        "nonfinite/{metric}",
        "NaN or infinite values recorded for the metric, which it leaves out.",
        "values",
        healthy=ZERO,
    ),
    newest("other/{metric}", "Value of another trainer's metric of this name, which has no counterpart here.", "?"),
)

FAMILIES: dict[str, tuple[Metric, ...]] = {
    "Training": TRAINING,
    "Policy": ACTOR,
    "Rewards and advantages": CRITIC,
    "Distillation": DISTILLATION,
    "Rollouts": ROLLOUT,
    "Gateway": GATEWAY,
    "Service": SERVICE,
    "Distributions": DISTRIBUTIONS,
    "Mismatch of engine and learner": CORRECTION,
    "Mixtures of experts": MIXTURES,
    "Weights": WEIGHTS,
    "Queue": QUEUE,
    "Asynchronous training": ASYNC,
    "Time": TIMING,
    "Memory": MEMORY,
    "Validation": VALIDATION,
    "Recording": RECORDING,
}
"""Metrics by chapter, in the order of the docs."""

DEFINITIONS = MetricTable(metric for family in FAMILIES.values() for metric in family)
"""Every metric of the project."""

NO_CHAPTER = "Other"
"""Chapter of undefined metrics."""

CHAPTERS = (*FAMILIES, NO_CHAPTER)

_TABLES = {chapter: MetricTable(metrics) for chapter, metrics in FAMILIES.items()}
_PLAIN = {metric.name: chapter for chapter, metrics in FAMILIES.items() for metric in metrics}


def chapter_of(name: str) -> str:
    """Return the chapter of a recorded metric; `NO_CHAPTER` if it is undefined."""
    if name in _PLAIN:
        return _PLAIN[name]
    return next((chapter for chapter, table in _TABLES.items() if name in table), NO_CHAPTER)
