"""Rules of convergence: does the policy move, and not too far at a time."""

from rl_metrics.definitions.entries import GUIDE, THUMB
from rl_metrics.health.common_rules import (
    BROKEN,
    DETERMINISTIC,
    EQUAL_REWARDS,
    IMPROVES,
    KL_COEFFICIENT,
    MISMATCH,
    PROVED_STALE,
    REFERENCE_KL,
    REWARD_ZERO,
    SOLVED,
    STANDS_STILL,
    TOO_FAST,
    TOO_MANY_UPDATES,
    TOO_OLD,
)
from rl_metrics.health.rules import Cause, Condition, Rule, Threshold

KL_GROWS = Condition(
    kind="rises",
    reads=(REFERENCE_KL,),
    limits={"max": 0.0, "by": 0.001},
    window=1_000_000,
    says="{metric} grows, if slowly",
)
WARMS_UP = Condition(
    kind="rises", reads=(("actor/lr",),), limits={"max": 0.0}, window=30, says="the learning rate still rises"
)

CONVERGENCE = (
    Rule(
        name="policy_loss",
        side="convergence",
        title="policy loss near 0",
        what="The policy loss stays far from 0.",
        conditions=(
            Condition(
                kind="level",
                reads=(("actor/pg_loss", "actor/loss"),),
                says="{metric} is at {value} (from {min} to {max} is healthy)",
            ),
        ),
        thresholds=(
            Threshold(name="min", default=-0.5, meaning="running median", source=GUIDE),
            Threshold(name="max", default=0.5, meaning="running median", source=GUIDE),
        ),
        causes=(
            MISMATCH,
            TOO_OLD,
            Cause(text="advantages are not centred", advice="look at critic/advantages/mean, and normalize them"),
            TOO_FAST,
        ),
    ),
    Rule(
        name="kl_high",
        side="convergence",
        title="KL of a step's updates",
        what="The policy moves too far within a step.",
        severity="critical",
        conditions=(
            Condition(
                kind="level",
                reads=(("actor/ppo_kl",),),
                says="{metric} is at {value} nats (0.005 to 0.02 is usual, over {max} is bad)",
            ),
        ),
        thresholds=(
            Threshold(name="max", default=0.03, meaning="running median, nats", source=GUIDE),
            Threshold(name="min", default=-0.03, meaning="running median, nats (k1 may be negative)", source=GUIDE),
        ),
        window=5,
        min_steps=5,
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
        title="the policy leaves the reference",
        what="The policy does not move away from the reference, and the reward does not rise.",
        severity="critical",
        conditions=(
            Condition(
                kind="level",
                reads=(REFERENCE_KL,),
                says="{metric} is at {value} nats (0.005 to 0.02 is usual, less means that it does not move)",
            ),
        ),
        thresholds=(Threshold(name="min", default=0.005, meaning="running median, nats", source=GUIDE),),
        min_steps=30,
        needs=(STANDS_STILL,),
        unless=(SOLVED, IMPROVES, KL_GROWS, WARMS_UP),
        causes=(
            REWARD_ZERO,
            EQUAL_REWARDS,
            Cause(
                text="the KL penalty is too strong",
                advice="divide algorithm.kl_coefficient by ten",
                sign=Condition(
                    kind="level",
                    reads=(KL_COEFFICIENT,),
                    limits={"max": 0.02},
                    window=5,
                    says="{metric} is {value}; up to 0.02 is usual",
                ),
            ),
            Cause(text="learning rate too low", advice="multiply the learning rate by three"),
        ),
    ),
    Rule(
        name="reference_kl_high",
        side="convergence",
        title="KL to the reference",
        what="The policy runs away from the reference without a gain in reward.",
        conditions=(
            Condition(
                kind="level",
                reads=(REFERENCE_KL,),
                says="{metric} is at {value} nats (0.005 to 0.02 is usual, over {max} is bad)",
            ),
        ),
        thresholds=(Threshold(name="max", default=0.03, meaning="running median, nats", source=GUIDE),),
        min_steps=15,
        needs=(STANDS_STILL,),
        unless=(SOLVED,),
        causes=(
            PROVED_STALE,
            MISMATCH,
            BROKEN,
            TOO_FAST,
            Cause(text="the KL penalty is too weak", advice="raise algorithm.kl_coefficient"),
        ),
    ),
    Rule(
        name="entropy_collapse",
        side="convergence",
        title="entropy does not collapse (0.2 to 0.5 nats is usual)",
        what="The policy has become deterministic before it learnt the task.",
        severity="critical",
        conditions=(
            Condition(
                kind="shrunk",
                reads=(("actor/entropy",),),
                limits={"min": "share", "below": "min"},
                says="{metric} is at {value:share} of its start, which was {before} nats "
                "(below {min:share} and {below} nats is a collapse)",
            ),
            Condition(
                kind="shrunk",
                reads=(("actor/entropy",),),
                limits={"min": "idle_share", "below": "min"},
                says="{metric} is at {value:share} of its start, which was {before} nats, and the reward has not risen "
                "(below {min:share} and {below} nats is then a collapse)",
                needs=(STANDS_STILL,),
            ),
        ),
        thresholds=(
            Threshold(name="min", default=0.2, meaning="running median, nats", source=GUIDE),
            Threshold(name="share", default=0.15, meaning="of its start", source=THUMB),
            Threshold(name="idle_share", default=0.5, meaning="of its start, without a gain in reward", source=THUMB),
        ),
        window=5,
        unless=(SOLVED, IMPROVES),
        causes=(
            BROKEN,
            Cause(
                text="every reward is 0, and other terms of the loss rule",
                advice="see the finding reward_zero",
                rule="reward_zero",
            ),
            Cause(
                text="an entropy bonus that is negative, or missing with a high learning rate",
                advice="set algorithm.entropy_coefficient at or above 0",
            ),
            TOO_FAST,
            Cause(text="clipping favours likely tokens", advice="raise the upper clip (clip-higher), or use Clip-Cov"),
            Cause(text="sampling too cold", advice="raise rollout.temperature"),
        ),
    ),
    Rule(
        name="entropy_drop",
        side="convergence",
        title="entropy falls slowly",
        what="The entropy dropped suddenly.",
        conditions=(
            Condition(
                kind="sudden_fall",
                reads=(("actor/entropy",),),
                limits={"min": "share", "least": "least"},
                says="{metric} fell to {value:share} within five steps (at least {min:share} is healthy)",
            ),
        ),
        thresholds=(
            Threshold(name="share", default=0.4, meaning="of the entropy five steps before", source=THUMB),
            Threshold(name="least", default=0.1, meaning="nats before the drop, below which none counts", source=THUMB),
        ),
        window=20,
        unless=(SOLVED,),
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
            Condition(
                kind="leap",
                reads=(("actor/entropy",),),
                says="{metric} is at {value} nats, and was at {before} ({times} times as much is too much)",
            ),
        ),
        thresholds=(
            Threshold(name="times", default=2.0, meaning="running median over that of the start", source=THUMB),
            Threshold(name="min", default=0.5, meaning="running median, nats: the guide's upper end", source=GUIDE),
        ),
        window=3,
        min_steps=6,
        unless=(SOLVED, IMPROVES),
        causes=(
            PROVED_STALE,
            MISMATCH,
            TOO_FAST,
            Cause(text="entropy bonus too high", advice="lower algorithm.entropy_coefficient"),
            TOO_OLD,
        ),
    ),
    Rule(
        name="clip_share",
        side="convergence",
        title="ratios within the clip range",
        what="Too many ratios are clipped.",
        conditions=(
            Condition(
                kind="level",
                reads=(("actor/pg_clipfrac",),),
                limits={"max": "max"},
                says="{metric}: {value:share} of the tokens (at most {max:share} is healthy)",
            ),
            Condition(
                kind="level",
                reads=(("actor/pg_clipfrac_lower",),),
                limits={"max": "lower_max"},
                says="{metric}: {value:share} of the tokens (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(
            Threshold(name="max", default=0.2, meaning="share of tokens", source=THUMB),
            Threshold(name="lower_max", default=0.1, meaning="share of tokens clipped by the dual clip", source=THUMB),
        ),
        window=5,
        min_steps=5,
        causes=(
            PROVED_STALE,
            MISMATCH,
            Cause(text="the policy moves too far within a step", advice="see the finding kl_high", rule="kl_high"),
            TOO_FAST,
            TOO_MANY_UPDATES,
        ),
    ),
)
