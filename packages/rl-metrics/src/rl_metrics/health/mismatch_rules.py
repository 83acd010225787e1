"""Stability rules for the mismatch between engine and learner."""

from functools import partial

from rl_metrics.definitions.entries import THUMB
from rl_metrics.health import common_rules as common
from rl_metrics.health.rules import Cause, Rule, Threshold, condition

REACHED = "{{metric}} reached {{value}}{} (at most {{max}} is normal)"
UNKNOWN_EXPERTS = common.share_of("tokens", "the engine's experts are unknown for ")
PROOF = "tolerance of the weight proof in bfloat16"

rule = partial(Rule, side="stability")

AGREEMENT = (
    rule(
        name="weights_proof",
        title="the engines have the learner's weights",
        what="A weight proof failed: the engines' weights are not the learner's.",
        severity="critical",
        conditions=(
            condition("highest", "weights/canary_max_diff", says=REACHED.format(" nats"), max="canary_max"),
            condition("highest", "weights/probe_max_diff", says=REACHED.format(""), max="probe_max"),
        ),
        thresholds=(
            Threshold("canary_max", 0.3, "nats; 0.001 in float32", PROOF),
            Threshold("probe_max", 0.03, "relative; 0.001 in float32", PROOF),
        ),
        min_steps=1,
        events=(("run_failed", "WeightProofError"), ("request_failed", "WeightProofError")),
        causes=(
            Cause(
                "stale weights: an update did not reach an engine",
                "restart the engines; look at weights.transport and the engines' logs",
            ),
            Cause(
                "the engine changes weights as it loads them: quantization, tied or renamed tensors",
                "compare the tensors' names and the engine's dtype",
            ),
        ),
    ),
    rule(
        name="engine_mismatch",
        title="engine and learner agree (train-inference mismatch)",
        what="Engine and learner assign different probabilities to the same tokens.",
        severity="critical",
        conditions=(
            condition("level", "rollout_corr/k3_kl", says=common.HEALTHY_NATS, max="kl_max"),
            condition("level", "training/rollout_probs_diff_mean", says=common.HEALTHY, max="diff_max"),
            condition("level", "training/rollout_logprobs_diff_mean", says=common.HEALTHY_NATS, max="nats_max"),
            condition(
                "level",
                "training/rollout_actor_probs_pearson_corr",
                says="{metric} is at {value} (at least {min} is healthy)",
                min="correlation_min",
            ),
        ),
        thresholds=(
            Threshold("kl_max", 0.1, "k3 KL, running median, nats", THUMB),
            Threshold("diff_max", 0.01, "mean difference of probabilities", THUMB),
            Threshold("nats_max", 0.1, "mean difference of logprobs, nats", THUMB),
            Threshold("correlation_min", 0.99, "correlation of probabilities", THUMB),
        ),
        window=5,
        min_steps=5,
        unless=(common.OFF_POLICY,),
        causes=(
            common.PROVED_STALE,
            Cause(
                "stale weights: the difference grows from step to step",
                common.RESTART,
                sign=condition(
                    "leap",
                    ("training/rollout_probs_diff_mean", "training/rollout_logprobs_diff_mean", "rollout_corr/k3_kl"),
                    window=3,
                    says="{metric} is at {value}, up from {before} in the first steps",
                    times=2.0,
                ),
            ),
            common.STUCK,
            Cause(
                "engine and learner use different templates or tokenizers",
                "run rl-metrics doctor on the run; compare the token ids of one prompt",
            ),
            Cause(
                "sampling that cuts the distribution (top-p, top-k, penalties), or another temperature",
                "leave rollout.top_p at 1, and use the same temperature for both",
            ),
            Cause(
                "tokens of a mixture train on other experts than those that sampled them",
                "see the finding replay; if the learner cannot replay, reject tokens with correction.reject",
                rule="replay",
            ),
            Cause(
                "engine and learner use different precision or kernels",
                "use the same dtype, or correct with correction.weights",
            ),
        ),
    ),
    rule(
        name="replay",
        title="the learner replays a mixture's experts",
        what="Tokens of a mixture train on experts chosen by the learner instead of the engine's.",
        conditions=(condition("level", "router/unknown_share", says=UNKNOWN_EXPERTS, max="unknown_max"),),
        thresholds=(Threshold("unknown_max", 0.01, "share of tokens, running median", THUMB),),
        min_steps=1,
        causes=(
            Cause(
                "rollouts from a skip cache that was written without experts", "rewrite the cache: rollout_cache.action"
            ),
            Cause(
                "your agent loop leaves Generation.routed_experts out of its trajectories",
                "copy them, as Conversation does; rollout.audit_share finds such sessions",
            ),
        ),
    ),
    rule(
        name="off_policy",
        title="old rollouts are close enough",
        what="The training data differs too much from what the policy would generate now.",
        conditions=(
            condition("level", "rollout_corr/k3_kl", says=common.HEALTHY_NATS, max="kl_max"),
            condition(
                "level",
                "rollout_corr/rollout_is_eff_sample_size",
                says="{metric}: {value:share} of the samples count (at least {min:share} is healthy)",
                min="samples_min",
            ),
            condition(
                "level", "rollout_corr/rollout_is_mean", says=common.IN_RANGE, min="weight_min", max="weight_max"
            ),
        ),
        thresholds=(
            Threshold("kl_max", 0.05, "k3 KL, running median, nats", THUMB),
            Threshold("samples_min", 0.5, "effective share of the samples", THUMB),
            Threshold("weight_min", 0.5, "mean importance weight", THUMB),
            Threshold("weight_max", 2.0, "mean importance weight", THUMB),
        ),
        needs=(common.OFF_POLICY,),
        causes=(
            common.PROVED_STALE,
            common.STUCK,
            Cause(
                "rollouts are too old for steps of this size",
                "lower schedule.max_staleness or schedule.sync_every, or correct with correction.weights",
            ),
            common.TOO_FAST,
        ),
    ),
)
