"""Stability rules: sound training data, and agreement of engine and learner."""

from rl_metrics.definitions.entries import BY_DESIGN, GRAD_NORM, GRAD_NORM_MEAN, GUIDE, THUMB
from rl_metrics.health.common_rules import (
    BROKEN,
    CUT_SHORT,
    DETERMINISTIC,
    EQUAL_REWARDS,
    HAS_GAINED,
    IMPROVES,
    KL_COEFFICIENT,
    MISMATCH,
    NOT_FINITE,
    PROVED_STALE,
    RANDOM,
    REWARD_ZERO,
    SCORE,
    SOLVED,
    STANDS_STILL,
    TOO_FAST,
    TOO_OLD,
    WITHOUT_SPREAD,
)
from rl_metrics.health.families import GRADIENT_ALONE, REWARDED
from rl_metrics.health.rules import Cause, Rule, Threshold, condition, from_band

OF_TRAJECTORIES = "{metric}: {value:share} of the trajectories (at most {max:share} is healthy)"
REACHED = "{metric} reached {value} in a step"

STABILITY = (
    Rule(
        name="grad_norm",
        side="stability",
        title="gradient norm below 1",
        what="The gradients stay large.",
        conditions=(
            condition("level", "actor/grad_norm", says="{metric} is at {value} (at most {max} is healthy)", max="max"),
            condition(
                "run_mean",
                "actor/grad_norm",
                says="{metric} is {value} on average over the run (at most {max} is healthy)",
                max="mean_max",
            ),
        ),
        thresholds=(
            *from_band(GRAD_NORM, "running median"),
            *from_band(GRAD_NORM_MEAN, "mean over the run", prefix="mean_"),
        ),
        min_steps=20,
        unless=(SOLVED, IMPROVES, HAS_GAINED),
        families=GRADIENT_ALONE,
        causes=(
            PROVED_STALE,
            MISMATCH,
            TOO_OLD,
            Cause(
                "the KL penalty outweighs the reward",
                "divide algorithm.kl_coefficient by ten",
                rule="policy_held",
            ),
            Cause(
                "the KL penalty outweighs the reward",
                "divide algorithm.kl_coefficient by ten",
                sign=condition(
                    "level", KL_COEFFICIENT, window=5, says="{metric} is {value}; up to 0.02 is usual", max=1.0
                ),
            ),
            TOO_FAST,
            Cause("large rewards or advantages", "normalize advantages, or scale the reward"),
            Cause("the batch is too small", "raise rollout.prompts_per_step or rollout.group_size"),
        ),
    ),
    Rule(
        name="grad_jump",
        side="stability",
        title="no jumps of the gradient norm",
        what="The gradient norm jumped.",
        conditions=(
            condition(
                "jumps",
                "actor/grad_norm",
                says="{metric} was more than {times} times the usual {before} in {value} of the last {window} steps",
            ),
        ),
        thresholds=(
            Threshold("times", 3.0, "minimum jump, over the median before", GUIDE),
            Threshold("count", 0.0, "allowed jumps", GUIDE),
            Threshold("least", 1.0, "minimum gradient norm of a jump", GUIDE),
        ),
        window=30,
        min_steps=4,
        families=GRADIENT_ALONE,
        causes=(
            PROVED_STALE,
            MISMATCH,
            TOO_OLD,
            TOO_FAST,
            Cause("the gradients are large at all steps", "see the finding grad_norm", rule="grad_norm"),
            Cause("a batch with extreme ratios or lengths", "clip gradients (optimizer.clip_grad = 1)"),
        ),
    ),
    Rule(
        name="not_finite",
        side="stability",
        title="all values are finite",
        what="Values that are not finite were dropped, or updates were skipped because of them.",
        conditions=(
            condition("highest", "actor/skipped_updates", says=REACHED),
            condition("highest", "nonfinite/*", says=REACHED),
        ),
        thresholds=(Threshold("max", 0.0, "values or updates in a step", BY_DESIGN),),
        min_steps=1,
        causes=(
            TOO_FAST,
            Cause("too little precision", "use bfloat16 or float32, not float16"),
            Cause("a reward or logprob that is not finite", "look at the first step with one"),
        ),
    ),
    Rule(
        name="lost_metrics",
        side="stability",
        title="metrics of every step stay recorded",
        what="Metrics recorded at every step are missing or not finite (NaN, infinite).",
        severity="critical",
        conditions=tuple(
            condition("lost", names, says="{metric} is missing or not finite in {value} newest steps")
            for names in (
                SCORE,
                ("actor/loss", "actor/pg_loss"),
                ("actor/grad_norm",),
                ("actor/entropy",),
                ("response_length/mean",),
            )
        ),
        thresholds=(Threshold("max", 5.0, "newest steps without a value", BY_DESIGN),),
        min_steps=10,
        causes=(
            Cause(
                "the policy is no longer finite: an update or learning rate was too large",
                "resume from an earlier checkpoint with a third of the learning rate",
            ),
            Cause("too little precision", "use bfloat16 or float32, not float16"),
            Cause("a reward or logprob that is not finite", "look at the first step with one"),
            Cause("the run no longer records them", "check what changed at its last resume"),
        ),
    ),
    Rule(
        name="no_advantages",
        side="stability",
        title="advantages are not all zero",
        what="Every advantage is 0: the policy learns nothing.",
        severity="critical",
        conditions=(
            condition(
                "zero",
                "critic/advantages/max",
                "critic/advantages/min",
                says="advantages differ from 0 by up to {value} in the last {window} steps",
            ),
        ),
        thresholds=(Threshold("max", 1e-9, "maximum advantage that counts as 0", BY_DESIGN),),
        window=5,
        min_steps=5,
        unless=(SOLVED,),
        families=REWARDED,
        causes=(
            REWARD_ZERO,
            BROKEN,
            EQUAL_REWARDS,
            Cause(
                "the advantage's options remove all differences", "look at algorithm.advantage and rollout.group_size"
            ),
        ),
    ),
    Rule(
        name="without_spread",
        side="stability",
        title="rewards differ within groups",
        what="In nearly every group all rewards are equal; such groups have no advantages.",
        conditions=(
            condition(
                "level", WITHOUT_SPREAD, says="{metric}: {value:share} of the groups (at most {max:share} is healthy)"
            ),
        ),
        thresholds=(Threshold("max", 0.9, "share of groups", THUMB),),
        window=5,
        min_steps=5,
        unless=(SOLVED,),
        families=REWARDED,
        causes=(
            REWARD_ZERO,
            DETERMINISTIC,
            BROKEN,
            CUT_SHORT,
            Cause(
                "the reward function gives every response of a prompt the same reward",
                "call it on a right and a wrong response to one prompt",
            ),
            Cause(
                "prompts are too easy or too hard",
                "choose prompts that are sometimes solved, or refill groups (dynamic_sampling.filter)",
            ),
        ),
    ),
    Rule(
        name="truncated",
        side="stability",
        title="responses end before the length limit",
        what="Many responses are cut at the length limit.",
        conditions=(
            condition(
                "level",
                "response_length/clip_ratio",
                says="{metric}: {value:share} of the responses (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(Threshold("max", 0.1, "share of responses", THUMB),),
        window=5,
        min_steps=5,
        causes=(
            NOT_FINITE,
            RANDOM,
            BROKEN,
            PROVED_STALE,
            Cause(
                "the limit is too low for the task",
                "raise rollout.max_response_tokens",
                sign=condition(
                    "level",
                    "response_length/clip_ratio",
                    window=1_000_000,
                    says="also in most of the run: {value:share} of the responses",
                    max=0.1,
                ),
            ),
            Cause(
                "the policy has learned not to stop",
                "penalize length in the reward, and check that the end token is trained",
            ),
            Cause("the limit is too low for the task", "raise rollout.max_response_tokens"),
        ),
    ),
    Rule(
        name="response_length",
        side="stability",
        title="response length",
        what="Responses have become much shorter or longer without a gain in reward.",
        conditions=(
            condition(
                "shrunk",
                "response_length/mean",
                says="{metric} is at {value:share} of its start of {before} tokens",
                min="shrunk",
            ),
            condition(
                "leap",
                "response_length/mean",
                says="{metric} is at {value} tokens, from {before} at first",
                times="grown",
            ),
        ),
        thresholds=(
            Threshold("shrunk", 0.33, "minimum share of its start", THUMB),
            Threshold("grown", 3.0, "maximum multiple of its start", THUMB),
        ),
        min_steps=30,
        unless=(SOLVED, IMPROVES),
        needs=(STANDS_STILL,),
        families=GRADIENT_ALONE,
        causes=(
            RANDOM,
            BROKEN,
            DETERMINISTIC,
            Cause(
                "the reward pays for long or short responses",
                "read the responses with the highest rewards, and penalize length",
            ),
        ),
    ),
    Rule(
        name="lost_rollouts",
        side="stability",
        title="sessions return trajectories",
        what="Many sessions failed, or returned nothing that can train.",
        conditions=(
            condition(
                "part_level",
                "rollout/failed_sessions",
                "rollout/num_trajectories",
                says="{metric}: {value:share} of the sessions (at most {max:share} is healthy)",
                max="failed_max",
            ),
            condition("level", "response/aborted_ratio", says=OF_TRAJECTORIES, max="aborted_max"),
            condition(
                "level",
                "rollout/unscored_trajectories",
                "rollout/num_trajectories",
                says=OF_TRAJECTORIES,
                max="failed_max",
            ),
            condition("highest", "rollout/audit_failures", says=REACHED, max="audit_max"),
        ),
        thresholds=(
            Threshold("failed_max", 0.1, "share of failed sessions, or of trajectories without a score", THUMB),
            Threshold("aborted_max", 0.1, "share of trajectories without a trained token", THUMB),
            Threshold("audit_max", 0.0, "failed audits in a step", BY_DESIGN),
        ),
        window=5,
        min_steps=1,
        reasons="sessions_failed",
        causes=(
            Cause(
                "the reward function fails",
                "fix the cause in the reason; filter the report's rollouts by failure",
                rule="failed_rewards",
            ),
            Cause(
                "an environment or a tool fails",
                "fix the cause in the reason; rollouts.jsonl has some of the failed sessions",
            ),
            Cause("requests run out of time", "look at agent_loop/slowest/*, and raise the deadlines"),
        ),
    ),
    Rule(
        name="broken_sessions",
        side="stability",
        title="an agent's turns are one conversation",
        what="Many agent requests start a new conversation; each trains as a separate trajectory.",
        conditions=(
            condition(
                "level",
                "gateway/new_root_share",
                says="{metric}: {value:share} of the requests (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(Threshold("max", 0.3, "share of the requests, running median", THUMB),),
        window=5,
        min_steps=1,
        causes=(
            Cause(
                "the agent changes its system prompt or tools between requests, for example by adding the time",
                "look at gateway/roots/system and gateway/roots/tools, and keep both constant",
            ),
            Cause(
                "the agent rewrites its history, for example with summaries or truncated tool results",
                "look at gateway/roots/user and gateway/roots/tool; give it more context, or make it only append",
            ),
        ),
    ),
    Rule(
        name="failed_rewards",
        side="stability",
        title="the reward function returns rewards",
        what="The reward function failed in some sessions, which are dropped or count 0.",
        conditions=(
            condition(
                "level",
                "rollout/failed_rewards",
                says="{metric}: {value} sessions in a step",
            ),
        ),
        thresholds=(Threshold("max", 0.0, "sessions in a step, running median", BY_DESIGN),),
        window=5,
        min_steps=1,
        reasons="sessions_failed",
        causes=(
            Cause(
                "it raises, hangs or returns no number for some responses",
                "fix the line in the reason; a wrong answer should be a reward of 0, not an error",
            ),
            Cause(
                "a service that it calls does not answer", 'raise reward.timeout_s, or set reward.on_failure = "retry"'
            ),
        ),
    ),
)
