"""Convergence rules: the policy changes, in steps of moderate size."""

from functools import partial

from rl_metrics.definitions import entries
from rl_metrics.definitions.definition import Band
from rl_metrics.health import common_rules as common
from rl_metrics.health.rules import GRADIENT_ALONE, REWARDED, Cause, Condition, Rule, Threshold, condition, from_band

USUAL = "{metric} is at {value} nats (0.005 to 0.02 is usual"
BEYOND_USUAL = USUAL + ", above {max} is too high)"
COLLAPSE = (
    "{metric} is at {value:share} of its start of {before} nats (below {min:share} and {below} nats is a collapse"
)
A_JUMP = f"{entries.GUIDE}: -0.1 to 0.5 is a jump"
UNIT_SIZE = "advantages of about unit size"
OF_UNIT_SIZE = f"losses of probability ratios, such as PPO's and GSPO's, and {UNIT_SIZE}"

KL_GROWS = condition(
    "rises", common.REFERENCE_KL, window=common.OVER_RUN, says="{metric} grows slowly", max=0.0, by=0.001
)
WARMS_UP = condition("rises", "actor/lr", window=30, says="the learning rate is still rising", max=0.0)


def uncentred(kind: str, value: str) -> Condition:
    """Return the condition that the loss is minus the mean advantage, as at ratios near 1.

    Advantages are centred by response, the loss is by token. The mean over the run needs `means_cancel`: the newest
    steps alone cannot explain it.
    """
    says = (
        f"it is minus the tokens' mean advantage of {value}, which depends on the lengths of good and bad responses, "
    )
    limits = {"max": entries.POLICY_LOSS_MEAN.high, "each": entries.ADVANTAGES_MEAN.high}
    return condition(kind, common.LOSS, "critic/advantages/mean", says=says + "not on the update", **limits)


def unscaled(values: str, *, window: int) -> Condition:
    """Return the condition that advantages are too large for the thresholds."""
    says = f"advantages reach {values}, and the thresholds are for {UNIT_SIZE}"
    return condition("level", "critic/advantages/max", window=window, says=says, max=10.0)


UNSCALED = unscaled("{value}", window=10)

rule = partial(Rule, side="convergence")

CONVERGENCE = (
    rule(
        name="policy_loss",
        title="policy loss near 0",
        what="The policy loss stays far from 0.",
        conditions=(
            condition(
                "level",
                common.LOSS,
                says=common.IN_RANGE,
                unless=(uncentred("cancels", "{value}"), UNSCALED),
                min="min",
                max="max",
            ),
            condition(
                "run_mean",
                common.LOSS,
                says=f"{common.OVER_THE_RUN} (from {{min}} to {{max}} is healthy)",
                min_steps=20,
                unless=(
                    uncentred("means_cancel", "{value} over the run"),
                    unscaled("{value} in most steps", window=common.OVER_RUN),
                ),
                min="mean_min",
                max="mean_max",
            ),
        ),
        thresholds=(
            *from_band(entries.POLICY_LOSS, "running median"),
            *from_band(entries.POLICY_LOSS_MEAN, "mean over the run", prefix="mean_"),
        ),
        holds=OF_UNIT_SIZE,
        families=GRADIENT_ALONE,
        causes=(
            common.MISMATCH,
            common.TOO_OLD,
            Cause("advantages are not centred", "look at critic/advantages/mean, and normalize advantages"),
            common.TOO_FAST,
        ),
    ),
    rule(
        name="loss_jump",
        title="no jumps of the policy loss",
        what="The policy loss jumped.",
        conditions=(
            condition(
                "rise_within",
                common.LOSS,
                says="{metric} rose by {value} above its usual value in a step of the last {window} "
                "(at most {by} is healthy)",
            ),
        ),
        thresholds=(Threshold("by", 0.5, "rise over the median of the ten steps before", A_JUMP),),
        window=30,
        min_steps=4,
        unless=(UNSCALED,),
        holds=OF_UNIT_SIZE,
        families=GRADIENT_ALONE,
        causes=(
            common.PROVED_STALE,
            common.MISMATCH,
            common.TOO_OLD,
            common.TOO_FAST,
            Cause("a batch with extreme rewards or ratios", "read that step's responses and rewards"),
        ),
    ),
    rule(
        name="kl_high",
        title="KL of a step's updates",
        what="The policy moves too far within a step.",
        severity="critical",
        conditions=(condition("level", "actor/ppo_kl", says=BEYOND_USUAL),),
        thresholds=from_band(entries.STEP_KL, "running median, nats; k1 may be negative"),
        window=5,
        min_steps=5,
        idle=(common.UNMOVED,),
        families=REWARDED,
        causes=(common.PROVED_STALE, common.MISMATCH, common.TOO_FAST, common.TOO_MANY_UPDATES),
    ),
    rule(
        name="policy_held",
        title="the policy moves away from the reference",
        what="The policy does not move away from the reference, and the reward does not rise.",
        severity="critical",
        conditions=(condition("level", common.REFERENCE_KL, says=USUAL + "; below, the policy does not move)"),),
        thresholds=(Threshold("min", 0.005, "running median, nats", entries.GUIDE),),
        min_steps=30,
        needs=(common.STANDS_STILL,),
        unless=(common.SOLVED, common.IMPROVES, KL_GROWS, WARMS_UP),
        families=GRADIENT_ALONE,
        causes=(
            common.REWARD_ZERO,
            common.EQUAL_REWARDS,
            Cause(
                "the KL penalty is too strong",
                "divide algorithm.kl_coefficient by ten",
                sign=common.kl_coefficient(above=0.02),
            ),
            common.TOO_SLOW,
        ),
    ),
    rule(
        name="kl_loss_high",
        title="KL loss",
        what="The policy moves far from the reference although a KL loss holds it.",
        conditions=(condition("level", "actor/kl_loss", says=BEYOND_USUAL),),
        thresholds=from_band(entries.KL_TO_REFERENCE, "running median, nats"),
        families=GRADIENT_ALONE,
        causes=(
            common.PROVED_STALE,
            common.MISMATCH,
            common.BROKEN,
            Cause("the KL penalty is too weak", "raise algorithm.kl_coefficient"),
            common.TOO_FAST,
        ),
    ),
    rule(
        name="reference_kl_high",
        title="KL to the reference, without a penalty",
        what="The policy moves far from the reference without a gain in reward.",
        conditions=(condition("level", "actor/reference_kl", says=BEYOND_USUAL),),
        thresholds=from_band(entries.KL_TO_REFERENCE, "running median, nats"),
        min_steps=30,
        needs=(common.STANDS_STILL,),
        unless=(common.SOLVED,),
        families=GRADIENT_ALONE,
        causes=(
            common.PROVED_STALE,
            common.MISMATCH,
            common.BROKEN,
            Cause("the KL penalty is too weak", "raise algorithm.kl_coefficient", rule="kl_loss_high"),
            common.TOO_FAST,
            Cause("no KL penalty holds it", "set algorithm.kl_coefficient"),
        ),
    ),
    rule(
        name="entropy_collapse",
        title="entropy does not collapse (0.2 to 0.5 nats is usual)",
        what="The policy became deterministic before it learned the task.",
        severity="critical",
        conditions=(
            condition("shrunk", "actor/entropy", says=COLLAPSE + ")", min="share", below="min"),
            condition(
                "shrunk",
                "actor/entropy",
                says=COLLAPSE + " if the reward has not risen)",
                needs=(common.STANDS_STILL,),
                min_steps=30,
                min="idle_share",
                below="min",
            ),
        ),
        thresholds=(
            *from_band(Band(low=entries.ENTROPY.low, source=entries.GUIDE), "running median, nats"),
            Threshold("share", 0.15, "share of its start", entries.THUMB),
            Threshold("idle_share", 0.5, "share of its start, without a gain in reward", entries.THUMB),
        ),
        window=5,
        unless=(common.SOLVED, common.IMPROVES),
        families=GRADIENT_ALONE,
        causes=(
            common.BROKEN,
            Cause(
                "every reward is 0, and other terms dominate the loss",
                "see the finding reward_zero",
                rule="reward_zero",
            ),
            Cause(
                "an entropy bonus that is negative, or missing with a high learning rate",
                "set algorithm.entropy_coefficient at or above 0",
            ),
            common.TOO_FAST,
            Cause("clipping favours likely tokens", "raise the upper clip (clip-higher), or use Clip-Cov"),
            Cause("sampling too cold", "raise rollout.temperature"),
        ),
    ),
    rule(
        name="entropy_drop",
        title="entropy falls slowly",
        what="The entropy dropped suddenly.",
        conditions=(
            condition(
                "sudden_fall",
                "actor/entropy",
                says="{metric} went to {value:share} within five steps (at least {min:share} is healthy)",
                min="share",
                least="least",
            ),
        ),
        thresholds=(
            Threshold("share", 0.4, "share of the entropy five steps earlier", entries.THUMB),
            Threshold("least", 0.1, "minimum entropy before the drop, nats", entries.THUMB),
        ),
        window=20,
        unless=(common.SOLVED,),
        families=GRADIENT_ALONE,
        causes=(common.DETERMINISTIC, common.TOO_FAST),
    ),
    rule(
        name="entropy_rise",
        title="entropy does not rise",
        what="The policy becomes more random.",
        severity="critical",
        conditions=(condition("leap", "actor/entropy", says=common.MANY_TIMES.format(" nats")),),
        thresholds=(
            Threshold("times", 2.0, "running median over the median at the start", entries.THUMB),
            Threshold("min", entries.ENTROPY.high or 0.0, "running median, nats: the guide's upper end", entries.GUIDE),
        ),
        window=3,
        min_steps=6,
        unless=(common.SOLVED, common.IMPROVES),
        families=GRADIENT_ALONE,
        causes=(
            common.PROVED_STALE,
            common.MISMATCH,
            common.TOO_FAST,
            Cause("entropy bonus too high", "lower algorithm.entropy_coefficient"),
            common.TOO_OLD,
        ),
    ),
    rule(
        name="entropy_final",
        title="entropy at the end",
        what="The policy is still undecided at the end: it has not converged.",
        conditions=(
            condition(
                "level",
                "actor/entropy",
                says="{metric} is at {value} nats (above {max} at the end, the policy has not converged)",
                at_end=True,
            ),
        ),
        thresholds=from_band(entries.LAST_ENTROPY, "running median at the end of the run, nats"),
        min_steps=20,
        unless=(common.SOLVED,),
        families=GRADIENT_ALONE,
        causes=(
            common.RANDOM,
            Cause("the run was too short", "continue it with --resume and more trainer.steps"),
            common.TOO_SLOW,
            Cause("entropy bonus too high", "lower algorithm.entropy_coefficient"),
        ),
    ),
    rule(
        name="clip_share",
        title="ratios within the clip range",
        what="Too many ratios are clipped.",
        conditions=(
            condition("level", "actor/pg_clipfrac", says=common.share_of("tokens"), max="max"),
            condition("level", "actor/pg_clipfrac_lower", says=common.share_of("tokens"), max="lower_max"),
        ),
        thresholds=(
            Threshold("max", 0.2, "share of tokens", entries.THUMB),
            Threshold("lower_max", 0.1, "share of tokens clipped by the dual clip", entries.THUMB),
        ),
        window=5,
        min_steps=5,
        idle=(common.UNMOVED,),
        families=REWARDED,
        causes=(
            common.PROVED_STALE,
            common.MISMATCH,
            Cause("the policy moves too far within a step", "see the finding kl_high", rule="kl_high"),
            common.TOO_FAST,
            common.TOO_MANY_UPDATES,
        ),
    ),
)
