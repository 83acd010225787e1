"""Stability rules: sound training data, and agreement of engine and learner."""

from dataclasses import replace
from functools import partial

from rl_metrics.definitions.entries import BY_DESIGN, GRAD_NORM, GRAD_NORM_MEAN, GUIDE, THUMB
from rl_metrics.health import common_rules as common
from rl_metrics.health.rules import GRADIENT_ALONE, REWARDED, Cause, Rule, Threshold, condition, from_band

OF_TRAJECTORIES = common.share_of("trajectories")
REACHED = "{metric} reached {value} in a step"
LENGTH = "response_length/mean"
FAILED = ("rollout/failed_sessions", "rollout/num_trajectories")
UNSCORED = ("rollout/unscored_trajectories", "rollout/num_trajectories")

NUMERIC = (
    Cause("too little precision", "use bfloat16 or float32, not float16"),
    Cause("a reward or logprob that is not finite", "look at the first step with one"),
)

LOW_LIMIT = Cause("the limit is too low for the task", "raise rollout.max_response_tokens")
CUT_BEFORE = condition(
    "level",
    "response_length/clip_ratio",
    window=common.OVER_RUN,
    says="also in most of the run: {value:share} of the responses",
    max=0.1,
)

rule = partial(Rule, side="stability")

STABILITY = (
    rule(
        name="grad_norm",
        title="gradient norm below 1",
        what="The gradients stay large.",
        conditions=(
            condition("level", "actor/grad_norm", says=common.HEALTHY, max="max"),
            condition(
                "run_mean", "actor/grad_norm", says=common.OVER_THE_RUN + " (at most {max} is healthy)", max="mean_max"
            ),
        ),
        thresholds=(
            *from_band(GRAD_NORM, "running median"),
            *from_band(GRAD_NORM_MEAN, "mean over the run", prefix="mean_"),
        ),
        min_steps=20,
        unless=(common.SOLVED, common.IMPROVES, common.HAS_GAINED),
        families=GRADIENT_ALONE,
        causes=(
            common.PROVED_STALE,
            common.MISMATCH,
            common.TOO_OLD,
            Cause("the KL penalty outweighs the reward", common.LESS_KL, rule="policy_held"),
            Cause("the KL penalty outweighs the reward", common.LESS_KL, sign=common.kl_coefficient(above=1.0)),
            common.TOO_FAST,
            Cause("large rewards or advantages", "normalize advantages, or scale the reward"),
            Cause("the batch is too small", "raise rollout.prompts_per_step or rollout.group_size"),
        ),
    ),
    rule(
        name="grad_jump",
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
            common.PROVED_STALE,
            common.MISMATCH,
            common.TOO_OLD,
            common.TOO_FAST,
            Cause("the gradients are large at all steps", "see the finding grad_norm", rule="grad_norm"),
            Cause("a batch with extreme ratios or lengths", "clip gradients (optimizer.clip_grad = 1)"),
        ),
    ),
    rule(
        name="not_finite",
        title="all values are finite",
        what="Values that are not finite were dropped, or updates were skipped because of them.",
        conditions=(
            condition("highest", "actor/skipped_updates", says=REACHED),
            condition("highest", "nonfinite/*", says=REACHED),
        ),
        thresholds=(Threshold("max", 0.0, "values or updates in a step", BY_DESIGN),),
        min_steps=1,
        causes=(common.TOO_FAST, *NUMERIC),
    ),
    rule(
        name="lost_metrics",
        title="metrics of every step stay recorded",
        what="Metrics recorded at every step are missing or not finite (NaN, infinite).",
        severity="critical",
        conditions=tuple(
            condition("lost", names, says="{metric} is missing or not finite in {value} newest steps")
            for names in (
                *(common.SCORE, common.LOSS[::-1]),
                *("actor/grad_norm", "actor/entropy", "response_length/mean"),
            )
        ),
        thresholds=(Threshold("max", 5.0, "newest steps without a value", BY_DESIGN),),
        min_steps=10,
        causes=(
            Cause("the policy is no longer finite: an update or learning rate was too large", common.RESUME),
            *NUMERIC,
            Cause("the run no longer records them", "check what changed at its last resume"),
        ),
    ),
    rule(
        name="no_advantages",
        title="advantages are not all zero",
        what="Every advantage is 0: the policy learns nothing.",
        severity="critical",
        conditions=(
            condition("zero", "critic/advantages/max", "critic/advantages/min", says="advantages" + common.WITHIN),
        ),
        thresholds=(Threshold("max", 1e-9, "maximum advantage that counts as 0", BY_DESIGN),),
        window=5,
        min_steps=5,
        unless=(common.SOLVED,),
        families=REWARDED,
        causes=(
            common.REWARD_ZERO,
            common.BROKEN,
            common.EQUAL_REWARDS,
            Cause(
                "the advantage's options remove all differences", "look at algorithm.advantage and rollout.group_size"
            ),
        ),
    ),
    rule(
        name="without_spread",
        title="rewards differ within groups",
        what="In nearly every group all rewards are equal; such groups have no advantages.",
        conditions=(condition("level", common.WITHOUT_SPREAD, says=common.share_of("groups")),),
        thresholds=(Threshold("max", 0.9, "share of groups", THUMB),),
        window=5,
        min_steps=5,
        unless=(common.SOLVED,),
        families=REWARDED,
        causes=(
            common.REWARD_ZERO,
            common.DETERMINISTIC,
            common.BROKEN,
            common.CUT_SHORT,
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
    rule(
        name="truncated",
        title="responses end before the length limit",
        what="Many responses are cut at the length limit.",
        conditions=(condition("level", "response_length/clip_ratio", says=common.share_of("responses")),),
        thresholds=(Threshold("max", 0.1, "share of responses", THUMB),),
        window=5,
        min_steps=5,
        causes=(
            common.NOT_FINITE,
            common.RANDOM,
            common.BROKEN,
            common.PROVED_STALE,
            replace(LOW_LIMIT, sign=CUT_BEFORE),
            Cause(
                "the policy has learned not to stop",
                "penalize length in the reward, and check that the end token is trained",
            ),
            LOW_LIMIT,
        ),
    ),
    rule(
        name="response_length",
        title="response length",
        what="Responses have become much shorter or longer without a gain in reward.",
        conditions=(
            condition(
                "shrunk", LENGTH, says="{metric} is at {value:share} of its start of {before} tokens", min="shrunk"
            ),
            condition("leap", LENGTH, says="{metric} is at {value} tokens, from {before} at first", times="grown"),
        ),
        thresholds=(
            Threshold("shrunk", 0.33, "minimum share of its start", THUMB),
            Threshold("grown", 3.0, "maximum multiple of its start", THUMB),
        ),
        min_steps=30,
        unless=(common.SOLVED, common.IMPROVES),
        needs=(common.STANDS_STILL,),
        families=GRADIENT_ALONE,
        causes=(
            common.RANDOM,
            common.BROKEN,
            common.DETERMINISTIC,
            Cause(
                "the reward pays for long or short responses",
                "read the responses with the highest rewards, and penalize length",
            ),
        ),
    ),
    rule(
        name="lost_rollouts",
        title="sessions return trajectories",
        what="Many sessions failed, or returned nothing that can train.",
        conditions=(
            condition("part_level", *FAILED, says=common.share_of("sessions"), max="failed_max"),
            condition("level", "response/aborted_ratio", says=OF_TRAJECTORIES, max="aborted_max"),
            condition("level", *UNSCORED, says=OF_TRAJECTORIES, max="failed_max"),
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
    rule(
        name="broken_sessions",
        title="an agent's turns are one conversation",
        what="Many agent requests start a new conversation; each trains as a separate trajectory.",
        conditions=(condition("level", "gateway/new_root_share", says=common.share_of("requests")),),
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
    rule(
        name="failed_rewards",
        title="the reward function returns rewards",
        what="The reward function failed in some sessions, which are dropped or count 0.",
        conditions=(condition("level", "rollout/failed_rewards", says="{metric}: {value} sessions in a step"),),
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
    rule(
        name="failed_requests",
        title="requests of the client succeed",
        what="Requests of a client of rl-service failed; their steps or samples are missing.",
        conditions=(condition("highest", "service/failed_requests", says=REACHED),),
        thresholds=(Threshold("max", 0.0, "failed requests in a step", BY_DESIGN),),
        min_steps=1,
        reasons="request_failed",
        causes=(
            Cause(
                "the program asks for something that the service refuses",
                "read the error in the evidence, which names the field and the limit",
            ),
            Cause("the engine or the learner failed", "look at the service's log"),
        ),
    ),
    rule(
        name="reward_spread",
        title="the spread of rewards does not grow",
        what="The rewards within groups spread more and more: training becomes unstable.",
        conditions=(condition("grown", "rollout/group_reward_std", says=common.MANY_TIMES.format("")),),
        thresholds=(Threshold("times", 3.0, "running median over the median at the start", THUMB),),
        unless=(
            condition(
                "within_bounds",
                "rollout/group_reward_std",
                "critic/score/mean",
                "critic/score/min",
                "critic/score/max",
                says="so much spread belongs to this mean of rewards between the same bounds",
                times=3.0,
            ),
        ),
        families=REWARDED,
        causes=(
            common.RANDOM,
            common.TOO_FAST,
            Cause("a part of the reward has no bounds", "look at reward/*, and bound or scale that part"),
            Cause("some prompts are solved and others are not", "look at distribution/reward and the report's groups"),
        ),
    ),
)
