"""Task rules: the policy learns what is rewarded."""

from rl_metrics.definitions.entries import BY_DESIGN, GUIDE, THUMB
from rl_metrics.health.common_rules import (
    BEST_SCORE,
    BROKEN,
    CUT_SHORT,
    DETERMINISTIC,
    IMPROVED,
    MISMATCH,
    NO_SPREAD,
    NOT_FINITE,
    PROVED_STALE,
    REWARD_ZERO,
    SCORE,
    SOLVED,
    TOO_FAST,
)
from rl_metrics.health.families import REWARDED
from rl_metrics.health.rules import Cause, Rule, Threshold, condition

BELOW_BEST = "{metric} is {value:share} below its best of {before} (at most {max:share} is healthy)"
ON_THE_WAY = "{metric} started at {before} and went at most {value:share} of the way to the highest reward"
ABOVE_START = "{metric} started at {before}, and its best is {value:share} above that"
BELOW_TRAINING = "{metric} is {value:share} below training's {before} (a new gap of at most {max:share} is healthy)"

TWO_ERRORS = 2.0
"""Standard errors of margin for a validation without an interval."""

THREE_IN_A_ROW = 3.0
"""Consecutive validations, because greedy responses can be temporarily worse while the policy changes."""

SURE = 6
"""Number of validations from which a verdict on them is sure; fewer are judged more cautiously, and it is said."""

TOO_HARD = Cause(
    "the prompts are too hard for this policy",
    "start with easier prompts, a warm start (SFT), or partial credit in the reward",
)

VALIDATED_REWARD = (
    "val-core/*/reward/mean@#",
    "val-core/*/score/mean@#",
    "val-aux/*/reward/mean@#",
    "val-aux/*/score/mean@#",
)
VALIDATED = "val-core/*/mean@#"
UPPER_END = "val-core/*/mean@#/ci_high"
"""Upper end of a validation's confidence interval; a fall within it is no loss."""

TASK = (
    Rule(
        name="reward_zero",
        side="task",
        title="some responses are rewarded",
        what="Every reward is 0.",
        severity="critical",
        conditions=(
            condition(
                "zero",
                SCORE,
                BEST_SCORE,
                says="rewards differ from 0 by up to {value} in the last {window} steps",
                can_do_with_one=True,
            ),
        ),
        thresholds=(Threshold("max", 1e-9, "maximum reward that counts as 0", BY_DESIGN),),
        min_steps=5,
        unless=(SOLVED,),
        families=REWARDED,
        causes=(
            NOT_FINITE,
            BROKEN,
            CUT_SHORT,
            Cause(
                "the reward function does not find answers, or compares them with the wrong field",
                "call the reward function on a response known to be right, and read some of the run's responses",
            ),
            TOO_HARD,
        ),
    ),
    Rule(
        name="reward_fell",
        side="task",
        title="the reward keeps its gains",
        what="The reward has fallen far below its best.",
        severity="critical",
        conditions=(condition("fall", SCORE, says=BELOW_BEST, max="max", by=0.01, errors=3.2),),
        thresholds=(Threshold("max", 0.25, "maximum loss, share of the best running median", THUMB),),
        causes=(
            NOT_FINITE,
            PROVED_STALE,
            MISMATCH,
            CUT_SHORT,
            DETERMINISTIC,
            Cause(
                "rollouts are too old for steps of this size",
                "lower schedule.max_staleness or schedule.sync_every, or the learning rate",
                rule="off_policy",
            ),
            Cause(
                "learning rate too high",
                "resume from a checkpoint before the fall with a third of the learning rate",
            ),
            Cause("the reward function changed, or fails", "look at its errors and at reward/*"),
        ),
    ),
    Rule(
        name="reward_flat",
        side="task",
        title="the reward has risen since the start",
        what="The reward has not risen since the start.",
        conditions=(
            condition(
                "no_rise",
                SCORE,
                BEST_SCORE,
                says=ON_THE_WAY,
            ),
            condition("no_rise", SCORE, says=ABOVE_START),
        ),
        thresholds=(Threshold("min", 0.1, "minimum gain, share of the way to the highest reward", THUMB),),
        min_steps=30,
        unless=(SOLVED, IMPROVED),
        families=REWARDED,
        causes=(
            Cause(
                "the reward function gives everything the same reward",
                "call the reward function on a right and a wrong response",
                rule="reward_zero",
            ),
            Cause(
                "the reward function gives every response of a prompt the same reward",
                "call the reward function on a right and a wrong response to one prompt",
                sign=NO_SPREAD,
            ),
            PROVED_STALE,
            MISMATCH,
            Cause("rollouts are not from the trained policy", "run rl-metrics doctor on the run", rule="off_policy"),
            Cause(
                "the KL penalty keeps the policy at the reference", "lower algorithm.kl_coefficient", rule="policy_held"
            ),
            DETERMINISTIC,
            CUT_SHORT,
            Cause("learning rate too high", "divide the learning rate by three", rule="reward_fell"),
            Cause("learning rate too low", "multiply the learning rate by three"),
            TOO_HARD,
        ),
    ),
    Rule(
        name="reward_rare",
        side="task",
        title="share of positive rewards",
        what="Hardly any response is rewarded.",
        conditions=(
            condition(
                "level",
                "rollout/positive_reward_ratio",
                says="{value:share} of the responses have a reward above 0 (at least {min:share} is healthy)",
            ),
        ),
        thresholds=(Threshold("min", 0.05, "share of rewards above 0", THUMB),),
        unless=(condition("level", ("critic/score/min", "critic/rewards/min"), min=0.0),),
        families=REWARDED,
        causes=(
            REWARD_ZERO,
            CUT_SHORT,
            BROKEN,
            TOO_HARD,
        ),
    ),
    Rule(
        name="overfitting",
        side="task",
        title="validation against training",
        what="The policy has become worse on validation than on its training prompts.",
        conditions=tuple(
            condition(
                "gap",
                *names,
                UPPER_END,
                says=BELOW_TRAINING,
                can_do_with_one=True,
                at_end=limit == "end_max",
                max=limit,
                errors=TWO_ERRORS,
                held=THREE_IN_A_ROW,
                sure=SURE,
            )
            for limit in ("max", "end_max")
            for names in ((SCORE, VALIDATED_REWARD), ("reward/acc/mean", "val-core/*/acc/mean@#"))
        ),
        thresholds=(
            Threshold("max", 0.2, "new gap beyond noise, as a share of the training reward", GUIDE),
            Threshold("end_max", 0.1, "the same at the end of the run", GUIDE),
        ),
        window=2,
        min_steps=2,
        sure_steps=SURE,
        causes=(
            Cause(
                "too few prompts, seen too often", "use more prompts or fewer epochs, or stop at the best validation"
            ),
            Cause(
                "the policy moves too far from the reference",
                "raise algorithm.kl_coefficient",
                rule="reference_kl_high",
            ),
            Cause(
                "steps are too large, or the reference does not hold the policy",
                "divide the learning rate by three, and raise algorithm.kl_coefficient",
            ),
            Cause("validation has different or harder prompts", "compare the prompts of both"),
            Cause(
                "the policy learned to exploit the reward function",
                "read the responses with the highest rewards, and score them by hand",
            ),
        ),
    ),
    Rule(
        name="validation_fell",
        side="task",
        title="validation keeps its gains",
        what="Validation has fallen below its best.",
        conditions=(
            condition(
                "fall",
                VALIDATED,
                UPPER_END,
                says=BELOW_BEST,
                can_do_with_one=True,
                max="max",
                by=0.01,
                errors=TWO_ERRORS,
                held=THREE_IN_A_ROW,
                sure=SURE,
            ),
        ),
        thresholds=(Threshold("max", 0.2, "maximum loss, share of the best", GUIDE),),
        window=1,
        min_steps=2,
        sure_steps=SURE,
        causes=(
            Cause(
                "the policy was broken by its updates",
                "resume from the best checkpoint with a third of the learning rate",
                rule="reward_fell",
            ),
            Cause("overfitting", "stop at the best validation, or train on more prompts", rule="overfitting"),
            TOO_FAST,
            Cause(
                "the validation data or its ground truths are wrong, or changed",
                "score some of its responses by hand, and compare prompts.validation with prompts.train",
            ),
        ),
    ),
    Rule(
        name="component_fell",
        side="task",
        title="rewards by component",
        what="A component of the reward falls while the total does not.",
        conditions=(condition("fall", "reward/*/mean", says=BELOW_BEST, max="max", by=0.05, errors=3.2),),
        thresholds=(Threshold("max", 0.3, "maximum loss, share of the component's best", THUMB),),
        min_steps=20,
        unless=(condition("fall", SCORE, max=0.1, by=0.01),),
        families=REWARDED,
        causes=(
            Cause(
                "the policy trades this component for another that pays more",
                "change the components' weights, and read the responses with the highest rewards",
            ),
        ),
    ),
)
