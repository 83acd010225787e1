"""The table of all metrics.

Names follow verl's where they exist, so that dashboards keep working.
"""

from rl_metrics.definitions.async_training import ASYNC
from rl_metrics.definitions.correction import CORRECTION
from rl_metrics.definitions.definition import Band, Metric, MetricTable
from rl_metrics.definitions.distillation import DISTILLATION
from rl_metrics.definitions.distributions import DISTRIBUTIONS
from rl_metrics.definitions.entries import (
    ADVANTAGES_MEAN,
    BY_DESIGN,
    ENTROPY,
    GRAD_NORM,
    KL_TO_REFERENCE,
    POLICY_LOSS,
    PROOF,
    STEP_KL,
    THUMB,
    mean,
    one,
    spread,
)
from rl_metrics.definitions.gateway import GATEWAY
from rl_metrics.definitions.memory import MEMORY
from rl_metrics.definitions.mixtures import MIXTURES
from rl_metrics.definitions.timing import TIMING
from rl_metrics.definitions.validation import VALIDATION

TRAINING = (
    one("training/global_step", "steps", "Optimizer steps of the policy done so far."),
    one("training/policy_version", "versions", "Weight updates published to the engines so far."),
    one("training/epoch", "epochs", "Current pass over the prompts, counted from 0."),
    *spread(
        "training/staleness",
        unit="versions",
        meaning="Learner's policy version minus the oldest in the trajectory",
        over="trajectory",
    ),
    mean(
        "training/rollout_probs_diff_mean",
        "1",
        "Absolute difference of learner's and engine's probability of a sampled token, mean.",
        over="token",
        healthy=Band(high=0.01, source=THUMB),
    ),
    one("training/rollout_probs_diff_max", "1", "Largest absolute difference of those probabilities.", reduction="max"),
    one("training/rollout_probs_diff_std", "1", "Sample standard deviation of that absolute difference."),
    mean(
        "training/rollout_logprobs_diff_mean",
        "nats",
        "Absolute difference of learner's and engine's logprob of a sampled token, mean; in TRL's runs.",
        over="token",
        healthy=Band(high=0.1, source=THUMB),
    ),
    one(
        "training/rollout_logprobs_diff_max",
        "nats",
        "Largest absolute difference of those logprobs; in TRL's runs.",
        reduction="max",
    ),
    one(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "Correlation of learner's and engine's probabilities of the sampled tokens.",
        healthy=Band(low=0.99, high=1.0, source=THUMB),
    ),
)

ACTOR = (
    mean("actor/loss", "1", "The whole objective over the global batch.", over="step"),
    mean(
        "actor/pg_loss",
        "1",
        "Policy-gradient part of the objective.",
        over="token",
        healthy=POLICY_LOSS,
    ),
    mean(
        "actor/pg_clipfrac",
        "1",
        "Share of trained tokens whose ratio was clipped by the PPO band.",
        over="token",
        healthy=Band(high=0.2, source=THUMB),
    ),
    mean(
        "actor/pg_clipfrac_lower",
        "1",
        "Share of trained tokens clipped by the dual clip (negative advantage, large ratio).",
        over="token",
        healthy=Band(high=0.1, source=THUMB),
    ),
    mean(
        "actor/ppo_kl",
        "nats",
        "k1 estimate of KL from the old policy to the trained one (mean of old minus new logprobs).",
        over="token",
        healthy=STEP_KL,
    ),
    mean(
        "actor/entropy",
        "nats",
        "Entropy of the policy at trained tokens.",
        over="token",
        healthy=ENTROPY,
    ),
    mean(
        "actor/kl_loss",
        "nats",
        "KL of the policy to the frozen reference, before its coefficient.",
        over="token",
        healthy=KL_TO_REFERENCE,
    ),
    one("actor/kl_coef", "1", "Coefficient of the KL to the reference."),
    one("actor/reference_kl", "nats", "KL of the sampling policy to the frozen reference.", healthy=KL_TO_REFERENCE),
    mean("actor/selected_fraction", "1", "Share of trained tokens selected by Clip-Cov or KL-Cov.", over="token"),
    mean(
        "actor/grad_norm",
        "1",
        "Global gradient norm before clipping.",
        over="step",
        healthy=GRAD_NORM,
    ),
    one("actor/lr", "1", "Learning rate of the step."),
    one(
        "actor/skipped_updates",
        "updates",
        "Updates skipped because loss or gradients were not finite.",
        reduction="sum",
    ),
    mean("sft/loss", "nats", "Cross entropy of the warm start's demonstrations.", over="token"),
    mean("sft/token_accuracy", "1", "Share of demonstration tokens that were the top prediction.", over="token"),
    mean("sft/grad_norm", "1", "Global gradient norm of the warm start before clipping.", over="step"),
    one("sft/lr", "1", "Learning rate of the warm start."),
    one("sft/num_tokens", "tokens", "Demonstration tokens that trained.", reduction="sum"),
    mean("sft/throughput", "tokens/s", "Demonstration tokens per second.", over="step"),
)

CRITIC = (
    *spread(
        "critic/score",
        unit="1",
        meaning="Reward of a trajectory, as returned by the reward function",
        over="trajectory",
    ),
    *spread("critic/rewards", unit="1", meaning="Reward of a trajectory after penalties", over="trajectory"),
    *spread(
        "critic/advantages",
        unit="1",
        meaning="Advantage of a trained token",
        over="token",
        healthy_mean=ADVANTAGES_MEAN,
    ),
    *spread("critic/returns", unit="1", meaning="Return of a trained token", over="token"),
    *spread("critic/values", unit="1", meaning="The critic's value of a trained token", over="token"),
    mean("critic/vf_loss", "1", "The critic's loss: half the squared error to the returns, clipped.", over="token"),
    mean(
        "critic/vf_clipfrac",
        "1",
        "Share of trained tokens whose value was clipped.",
        over="token",
        healthy=Band(high=0.2, source=THUMB),
    ),
    mean("critic/vpred_mean", "1", "Value of a trained token, computed by the critic during its update.", over="token"),
    one("critic/grad_norm", "1", "Global norm of the critic's gradients before clipping."),
    one("critic/lr", "1", "Learning rate of the critic's step."),
    one(
        "critic/skipped_updates",
        "updates",
        "Updates of the critic skipped because loss or gradients were not finite.",
        reduction="sum",
    ),
    *spread("reward/{component}", unit="1", meaning="One named component of the reward", over="trajectory"),
)

ROLLOUT = (
    *spread(
        "response_length", unit="tokens", meaning="Tokens from the first sampled one to the end", over="trajectory"
    ),
    mean(
        "response_length/clip_ratio",
        "1",
        "Share of responses cut at the length limit.",
        over="trajectory",
        healthy=Band(high=0.1, source=THUMB),
    ),
    *spread("prompt_length", unit="tokens", meaning="Tokens before the first sampled one", over="trajectory"),
    *spread(
        "num_turns",
        unit="turns",
        meaning="Turns of a trajectory: the prompt, the policy's responses, and the answers of tools or environments",
        over="trajectory",
    ),
    mean("prompt_length/clip_ratio", "1", "Share of prompts at the length limit.", over="trajectory"),
    mean(
        "response/aborted_ratio",
        "1",
        "Share of trajectories without a trained token.",
        over="trajectory",
        healthy=Band(high=0.1, source=THUMB),
    ),
    one("rollout/num_groups", "groups", "Prompts in the batch.", reduction="sum"),
    one("rollout/num_trajectories", "trajectories", "Trajectories in the batch.", reduction="sum"),
    one(
        "rollout/unscored_trajectories",
        "trajectories",
        "Trajectories without a reward; reward metrics ignore them.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "rollout/audited_sessions",
        "sessions",
        "Sessions whose tokens were compared with the engine's.",
        reduction="sum",
    ),
    one(
        "rollout/audit_failures",
        "sessions",
        "Audited sessions that failed: a token was not sampled by the engine, or not in this context.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "rollout/rescored_sessions",
        "sessions",
        "Sessions that the engine scored again with the weights that sampled them.",
        reduction="sum",
    ),
    one(
        "rollout/rescored_skipped",
        "sessions",
        "Sessions selected for this but not scored again: sampled by several versions, or new weights had arrived.",
        reduction="sum",
    ),
    mean(
        "rollout/rescored_diff_mean",
        "nats",
        "Absolute difference of a token's logprob when sampled and when scored again, mean.",
        over="token",
        healthy=Band(high=0.1, source=THUMB),
    ),
    one("rollout/rescored_diff_max", "nats", "Largest of those differences.", reduction="max"),
    mean(
        "rollout/replayed",
        "1",
        "Share of a step's groups that came from a skip cache; 1 if nothing was generated.",
        over="group",
    ),
    one("rollout/num_rounds", "rounds", "Rounds of generation in a step, if groups are refilled.", reduction="sum"),
    one("rollout/refused_groups", "groups", "Groups refused by the filter.", reduction="sum"),
    one(
        "rollout/made_up_groups",
        "groups",
        "Refused groups that trained because rounds ran out.",
        reduction="sum",
    ),
    one(
        "rollout/failed_sessions",
        "sessions",
        "Sessions that ended with an error and without a trajectory.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "rollout/failed_rewards",
        "sessions",
        "Sessions whose reward function raised, timed out, or returned no number; they fail, or count 0.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    mean(
        "rollout/positive_reward_ratio", "1", "Share of scored trajectories with a reward above 0.", over="trajectory"
    ),
    mean(
        "rollout/groups_without_spread_ratio",
        "1",
        "Share of groups whose rewards are all equal; their advantages are 0.",
        over="group",
        healthy=Band(high=0.9, source=THUMB),
    ),
    mean("rollout/group_reward_std", "1", "Standard deviation of the rewards within a group.", over="group"),
    *(
        metric
        for name, unit, meaning in (
            ("generate_sequences", "s", "Generation time of a trajectory"),
            ("tool_calls", "s", "Tool time of a trajectory"),
            ("compute_score", "s", "Reward time of a trajectory, including those whose reward failed"),
            ("num_preempted", "times", "Preemptions of a trajectory's requests in the engine"),
        )
        for metric in spread(f"agent_loop/{name}", unit=unit, meaning=meaning, over="trajectory")
    ),
    one(
        "agent_loop/slowest/generate_sequences", "s", "Generation of the slowest trajectory (generate + tools + score)."
    ),
    one("agent_loop/slowest/tool_calls", "s", "Tools of the slowest trajectory."),
    one("agent_loop/slowest/compute_score", "s", "Reward of the slowest trajectory."),
    one("agent_loop/slowest/num_preempted", "times", "Preemptions of the slowest trajectory."),
    one("agent_loop/slowest/prompt_length", "tokens", "Prompt length of the slowest trajectory."),
    one("agent_loop/slowest/response_length", "tokens", "Response length of the slowest trajectory."),
    one(
        "tools/calls/{outcome}",
        "calls",
        "Tool calls of the loop `tools` by outcome: ok, truncated, or an error that the model reads, such as "
        "malformed_call, unknown_tool, bad_arguments or timed_out.",
        reduction="sum",
    ),
    one("tools/ok_share", "1", "Share of tool calls that returned a result, ok or truncated."),
)

WEIGHTS = (
    one(
        "weights/canary_max_diff",
        "nats",
        "Largest difference of engine's and learner's logprobs on the canary after an update.",
        reduction="max",
        healthy=Band(high=1e-3, source=PROOF),
    ),
    one(
        "weights/probe_max_diff",
        "1",
        "Largest relative difference of a live tensor's probe from the learner's.",
        reduction="max",
        healthy=Band(high=1e-3, source=PROOF),
    ),
    one("weights/num_tensors", "tensors", "Tensors published in an update."),
    one("weights/size_gb", "GiB", "Bytes published in an update."),
)

QUEUE = (
    one(
        "queue/groups/{state}", "groups", "Groups in this state (issued, settled, done, dropped) in the transfer queue."
    ),
    one("queue/rows", "rows", "Rows in the queue."),
    one(
        "queue/rows/{state}",
        "rows",
        "Of these, rows of groups in this state; also leased rows, and rows reserved for writing.",
    ),
    one("queue/size_bytes", "bytes", "Memory of the queue's rows."),
    one(
        "queue/size_bytes/{state}",
        "bytes",
        "Of this, the memory of groups in this state; also of leased and reserved rows.",
    ),
    one("queue/leases", "leases", "Current leases."),
    one("queue/claims", "claims", "Current claims of producers."),
    one("queue/oldest_lease_s", "s", "Age of the oldest current lease."),
    one("queue/oldest_issued_s", "s", "Age of the oldest group with an unfinished session."),
    one("queue/waiting/{kind}", "requests", "Waiting requests: put for capacity, lease for groups."),
    one("queue/waited_s/{kind}", "s", "Total time that answered requests of this kind waited so far."),
    one("queue/leases_expired", "leases", "Leases and claims that expired so far."),
    one("queue/reissued", "groups", "Groups issued again so far."),
    one("queue/acks/{task}", "groups", "Groups acked by this task so far."),
    one("queue/drops/{reason}", "groups", "Groups dropped for this reason so far."),
)

RECORDING = (
    one(
        "nonfinite/{metric}",
        "values",
        "NaN or infinite values recorded for the metric, which it leaves out.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one("other/{metric}", "?", "Value of another trainer's metric of this name, which has no counterpart here."),
)

FAMILIES: dict[str, tuple[Metric, ...]] = {
    "Training": TRAINING,
    "Policy": ACTOR,
    "Rewards and advantages": CRITIC,
    "Distillation": DISTILLATION,
    "Rollouts": ROLLOUT,
    "Gateway": GATEWAY,
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
