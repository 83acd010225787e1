"""Convergence rules: the policy changes, in steps of moderate size."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import (
    ADVANTAGES_MEAN,
    ENTROPY,
    GUIDE,
    KL_TO_REFERENCE,
    LAST_ENTROPY,
    POLICY_LOSS,
    POLICY_LOSS_MEAN,
    STEP_KL,
    THUMB,
)
from rl_metrics.health.common_rules import (
    BROKEN,
    DETERMINISTIC,
    EQUAL_REWARDS,
    IMPROVES,
    KL_COEFFICIENT,
    LOSS,
    MISMATCH,
    PROVED_STALE,
    RANDOM,
    REFERENCE_KL,
    REWARD_ZERO,
    SOLVED,
    STANDS_STILL,
    TOO_FAST,
    TOO_MANY_UPDATES,
    TOO_OLD,
    UNMOVED,
)
from rl_metrics.health.families import GRADIENT_ALONE, REWARDED
from rl_metrics.health.rules import Cause, Rule, Threshold, condition, from_band

OF_TOKENS = "{metric}: {value:share} of the tokens (at most {max:share} is healthy)"
BEYOND_USUAL = "{metric} is at {value} nats (0.005 to 0.02 is usual, above {max} is too high)"

KL_GROWS = condition("rises", REFERENCE_KL, window=1_000_000, says="{metric} grows slowly", max=0.0, by=0.001)
WARMS_UP = condition("rises", "actor/lr", window=30, says="the learning rate is still rising", max=0.0)

OF_LENGTHS = "which depends on the lengths of good and bad responses, not on the update"
UNCENTRED = condition(
    "cancels",
    LOSS,
    "critic/advantages/mean",
    says="it is minus the tokens' mean advantage of {value}, " + OF_LENGTHS,
    max=POLICY_LOSS_MEAN.high or 0.0,
    each=ADVANTAGES_MEAN.high or 0.0,
)
"""At ratios near 1 the loss is minus the mean advantage. Advantages are centred by response, the loss is by token."""

UNCENTRED_MEAN = condition(
    "means_cancel",
    LOSS,
    "critic/advantages/mean",
    says="it is minus the tokens' mean advantage of {value} over the run, " + OF_LENGTHS,
    max=POLICY_LOSS_MEAN.high or 0.0,
    each=ADVANTAGES_MEAN.high or 0.0,
)
"""The same for the mean over the run, which the newest steps alone cannot explain."""

UNSCALED = condition(
    "level",
    "critic/advantages/max",
    says="advantages reach {value}, and the thresholds are for advantages of about unit size",
    max=10.0,
)
UNSCALED_MEAN = condition(
    "level",
    "critic/advantages/max",
    window=1_000_000,
    says="advantages reach {value} in most steps, and the thresholds are for advantages of about unit size",
    max=10.0,
)
OF_UNIT_SIZE = "losses of probability ratios, such as PPO's and GSPO's, and advantages of about unit size"

CONVERGENCE = (
    Rule(
        name="policy_loss",
        side="convergence",
        title="policy loss near 0",
        what="The policy loss stays far from 0.",
        conditions=(
            condition(
                "level",
                LOSS,
                says="{metric} is at {value} (from {min} to {max} is healthy)",
                unless=(UNCENTRED, UNSCALED),
                min="min",
                max="max",
            ),
            condition(
                "run_mean",
                LOSS,
                says="{metric} is {value} on average over the run (from {min} to {max} is healthy)",
                min_steps=20,
                unless=(UNCENTRED_MEAN, UNSCALED_MEAN),
                min="mean_min",
                max="mean_max",
            ),
        ),
        thresholds=(
            *from_band(POLICY_LOSS, "running median"),
            *from_band(POLICY_LOSS_MEAN, "mean over the run", prefix="mean_"),
        ),
        holds=OF_UNIT_SIZE,
        families=GRADIENT_ALONE,
        causes=(
            MISMATCH,
            TOO_OLD,
            Cause("advantages are not centred", "look at critic/advantages/mean, and normalize advantages"),
            TOO_FAST,
        ),
    ),
    Rule(
        name="loss_jump",
        side="convergence",
        title="no jumps of the policy loss",
        what="The policy loss jumped.",
        conditions=(
            condition(
                "rise_within",
                LOSS,
                says="{metric} rose by {value} above its usual value in a step of the last {window} (at most {by} is "
                "healthy)",
            ),
        ),
        thresholds=(
            Threshold("by", 0.5, "rise over the median of the ten steps before", f"{GUIDE}: -0.1 to 0.5 is a jump"),
        ),
        window=30,
        min_steps=4,
        unless=(UNSCALED,),
        holds=OF_UNIT_SIZE,
        families=GRADIENT_ALONE,
        causes=(
            PROVED_STALE,
            MISMATCH,
            TOO_OLD,
            TOO_FAST,
            Cause("a batch with extreme rewards or ratios", "read that step's responses and rewards"),
        ),
    ),
    Rule(
        name="kl_high",
        side="convergence",
        title="KL of a step's updates",
        what="The policy moves too far within a step.",
        severity="critical",
        conditions=(condition("level", "actor/ppo_kl", says=BEYOND_USUAL),),
        thresholds=from_band(STEP_KL, "running median, nats; k1 may be negative"),
        window=5,
        min_steps=5,
        idle=(UNMOVED,),
        families=REWARDED,
        causes=(
            PROVED_STALE,
            MISMATCH,
            TOO_FAST,
            TOO_MANY_UPDATES,
        ),
    ),
    Rule(
        name="policy_held",
        side="convergence",
        title="the policy moves away from the reference",
        what="The policy does not move away from the reference, and the reward does not rise.",
        severity="critical",
        conditions=(
            condition(
                "level",
                REFERENCE_KL,
                says="{metric} is at {value} nats (0.005 to 0.02 is usual; below, the policy does not move)",
            ),
        ),
        thresholds=(Threshold("min", 0.005, "running median, nats", GUIDE),),
        min_steps=30,
        needs=(STANDS_STILL,),
        unless=(SOLVED, IMPROVES, KL_GROWS, WARMS_UP),
        families=GRADIENT_ALONE,
        causes=(
            REWARD_ZERO,
            EQUAL_REWARDS,
            Cause(
                "the KL penalty is too strong",
                "divide algorithm.kl_coefficient by ten",
                sign=condition(
                    "level", KL_COEFFICIENT, window=5, says="{metric} is {value}; up to 0.02 is usual", max=0.02
                ),
            ),
            Cause("learning rate too low", "multiply the learning rate by three"),
        ),
    ),
    Rule(
        name="kl_loss_high",
        side="convergence",
        title="KL loss",
        what="The policy moves far from the reference although a KL loss holds it.",
        conditions=(condition("level", "actor/kl_loss", says=BEYOND_USUAL),),
        thresholds=from_band(KL_TO_REFERENCE, "running median, nats"),
        families=GRADIENT_ALONE,
        causes=(
            PROVED_STALE,
            MISMATCH,
            BROKEN,
            Cause("the KL penalty is too weak", "raise algorithm.kl_coefficient"),
            TOO_FAST,
        ),
    ),
    Rule(
        name="reference_kl_high",
        side="convergence",
        title="KL to the reference, without a penalty",
        what="The policy moves far from the reference without a gain in reward.",
        conditions=(condition("level", "actor/reference_kl", says=BEYOND_USUAL),),
        thresholds=from_band(KL_TO_REFERENCE, "running median, nats"),
        min_steps=30,
        needs=(STANDS_STILL,),
        unless=(SOLVED,),
        families=GRADIENT_ALONE,
        causes=(
            PROVED_STALE,
            MISMATCH,
            BROKEN,
            Cause("the KL penalty is too weak", "raise algorithm.kl_coefficient", rule="kl_loss_high"),
            TOO_FAST,
            Cause("no KL penalty holds it", "set algorithm.kl_coefficient"),
        ),
    ),
    Rule(
        name="entropy_collapse",
        side="convergence",
        title="entropy does not collapse (0.2 to 0.5 nats is usual)",
        what="The policy became deterministic before it learned the task.",
        severity="critical",
        conditions=(
            condition(
                "shrunk",
                "actor/entropy",
                says="{metric} is at {value:share} of its start of {before} nats "
                "(below {min:share} and {below} nats is a collapse)",
                min="share",
                below="min",
            ),
            condition(
                "shrunk",
                "actor/entropy",
                says="{metric} is at {value:share} of its start of {before} nats (below {min:share} and {below} nats "
                "is a collapse if the reward has not risen)",
                needs=(STANDS_STILL,),
                min_steps=30,
                min="idle_share",
                below="min",
            ),
        ),
        thresholds=(
            *from_band(Band(low=ENTROPY.low, source=GUIDE), "running median, nats"),
            Threshold("share", 0.15, "share of its start", THUMB),
            Threshold("idle_share", 0.5, "share of its start, without a gain in reward", THUMB),
        ),
        window=5,
        unless=(SOLVED, IMPROVES),
        families=GRADIENT_ALONE,
        causes=(
            BROKEN,
            Cause(
                "every reward is 0, and other terms dominate the loss",
                "see the finding reward_zero",
                rule="reward_zero",
            ),
            Cause(
                "an entropy bonus that is negative, or missing with a high learning rate",
                "set algorithm.entropy_coefficient at or above 0",
            ),
            TOO_FAST,
            Cause("clipping favours likely tokens", "raise the upper clip (clip-higher), or use Clip-Cov"),
            Cause("sampling too cold", "raise rollout.temperature"),
        ),
    ),
    Rule(
        name="entropy_drop",
        side="convergence",
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
            Threshold("share", 0.4, "share of the entropy five steps earlier", THUMB),
            Threshold("least", 0.1, "minimum entropy before the drop, nats", THUMB),
        ),
        window=20,
        unless=(SOLVED,),
        families=GRADIENT_ALONE,
        causes=(
            DETERMINISTIC,
            TOO_FAST,
        ),
    ),
    Rule(
        name="entropy_rise",
        side="convergence",
        title="entropy does not rise",
        what="The policy becomes more random.",
        severity="critical",
        conditions=(
            condition(
                "leap",
                "actor/entropy",
                says="{metric} is at {value} nats, from {before} at first ({times} times as much is too much)",
            ),
        ),
        thresholds=(
            Threshold("times", 2.0, "running median over the median at the start", THUMB),
            Threshold("min", ENTROPY.high or 0.0, "running median, nats: the guide's upper end", GUIDE),
        ),
        window=3,
        min_steps=6,
        unless=(SOLVED, IMPROVES),
        families=GRADIENT_ALONE,
        causes=(
            PROVED_STALE,
            MISMATCH,
            TOO_FAST,
            Cause("entropy bonus too high", "lower algorithm.entropy_coefficient"),
            TOO_OLD,
        ),
    ),
    Rule(
        name="entropy_final",
        side="convergence",
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
        thresholds=from_band(LAST_ENTROPY, "running median at the end of the run, nats"),
        min_steps=20,
        unless=(SOLVED,),
        families=GRADIENT_ALONE,
        causes=(
            RANDOM,
            Cause("the run was too short", "continue it with --resume and more trainer.steps"),
            Cause("learning rate too low", "multiply the learning rate by three"),
            Cause("entropy bonus too high", "lower algorithm.entropy_coefficient"),
        ),
    ),
    Rule(
        name="clip_share",
        side="convergence",
        title="ratios within the clip range",
        what="Too many ratios are clipped.",
        conditions=(
            condition("level", "actor/pg_clipfrac", says=OF_TOKENS, max="max"),
            condition("level", "actor/pg_clipfrac_lower", says=OF_TOKENS, max="lower_max"),
        ),
        thresholds=(
            Threshold("max", 0.2, "share of tokens", THUMB),
            Threshold("lower_max", 0.1, "share of tokens clipped by the dual clip", THUMB),
        ),
        window=5,
        min_steps=5,
        idle=(UNMOVED,),
        families=REWARDED,
        causes=(
            PROVED_STALE,
            MISMATCH,
            Cause("the policy moves too far within a step", "see the finding kl_high", rule="kl_high"),
            TOO_FAST,
            TOO_MANY_UPDATES,
        ),
    ),
)
