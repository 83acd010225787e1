"""Rules of the task: does the policy learn what it is rewarded for."""

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
from rl_metrics.health.rules import Cause, Condition, Rule, Threshold

TOO_HARD = Cause(
    text="the prompts are too hard for this policy",
    advice="begin with easier prompts, a warm start (SFT), or partial credit in the reward",
)

VALIDATED_REWARD = (
    "val-core/*/reward/mean@#/ci_high",
    "val-core/*/reward/mean@#",
    "val-core/*/score/mean@#",
    "val-aux/*/reward/mean@#",
    "val-aux/*/score/mean@#",
)
VALIDATED_ACCURACY = ("val-core/*/acc/mean@#/ci_high", "val-core/*/acc/mean@#")
"""Upper ends of confidence intervals where there are some: a gap is one that the draw of problems does not explain."""

TASK = (
    Rule(
        name="reward_zero",
        side="task",
        title="some responses are rewarded",
        what="Every reward has been 0 since the first step.",
        severity="critical",
        conditions=(
            Condition(
                kind="never_positive",
                reads=(SCORE,),
                says="{metric} has never been other than 0 (largest {value})",
            ),
        ),
        thresholds=(
            Threshold(name="max", default=1e-9, meaning="largest mean reward that counts as 0", source=BY_DESIGN),
        ),
        min_steps=5,
        causes=(
            CUT_SHORT,
            Cause(
                text="the reward function does not find answers, or compares them with the wrong field",
                advice="call the reward function on a response that you know to be right, and read some of the run's",
            ),
            TOO_HARD,
        ),
    ),
    Rule(
        name="reward_fell",
        side="task",
        title="the reward keeps what it gained",
        what="The reward has fallen far below its best.",
        severity="critical",
        conditions=(
            Condition(
                kind="fall",
                reads=(SCORE,),
                limits={"max": "max", "by": 0.01, "errors": 3.2},
                says="{metric} is {value:share} below its best, which was {before} (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(
            Threshold(
                name="max", default=0.25, meaning="share of the best running median that may be lost", source=THUMB
            ),
        ),
        causes=(
            NOT_FINITE,
            PROVED_STALE,
            MISMATCH,
            CUT_SHORT,
            DETERMINISTIC,
            Cause(
                text="rollouts are too old for steps of this size",
                advice="lower schedule.max_staleness or schedule.sync_every, or the learning rate",
                rule="off_policy",
            ),
            Cause(
                text="learning rate too high",
                advice="go back to a checkpoint from before the fall, with a third of the learning rate",
            ),
            Cause(text="the reward function changed its mind, or fails", advice="look at its errors and at reward/*"),
        ),
    ),
    Rule(
        name="reward_flat",
        side="task",
        title="the reward has risen since the start",
        what="The reward has not risen since the start.",
        conditions=(
            Condition(
                kind="no_rise",
                reads=(SCORE, BEST_SCORE),
                says="{metric} began at {before} and went at best {value:share} of the way to the highest reward",
            ),
            Condition(
                kind="no_rise",
                reads=(SCORE,),
                says="{metric} began at {before}, and its best is {value:share} above that",
            ),
        ),
        thresholds=(
            Threshold(
                name="min", default=0.1, meaning="share of the way to the highest reward to be gained", source=THUMB
            ),
        ),
        min_steps=30,
        unless=(SOLVED, IMPROVED),
        causes=(
            Cause(
                text="the reward function gives everything the same reward",
                advice="call the reward function on a right and on a wrong response",
                rule="reward_zero",
            ),
            Cause(
                text="the reward function gives every response of a prompt the same reward",
                advice="call the reward function on a right and on a wrong response of one prompt",
                sign=NO_SPREAD,
            ),
            PROVED_STALE,
            MISMATCH,
            Cause(
                text="rollouts are not of the policy that learns",
                advice="run rl-metrics doctor on the run",
                rule="off_policy",
            ),
            Cause(
                text="the KL penalty holds the policy where it was",
                advice="lower algorithm.kl_coefficient",
                rule="policy_held",
            ),
            DETERMINISTIC,
            CUT_SHORT,
            Cause(text="learning rate too high", advice="divide the learning rate by three", rule="reward_fell"),
            Cause(text="learning rate too low", advice="multiply the learning rate by three"),
            TOO_HARD,
        ),
    ),
    Rule(
        name="reward_rare",
        side="task",
        title="share of positive rewards",
        what="Hardly any response is rewarded.",
        conditions=(
            Condition(
                kind="level",
                reads=(("rollout/positive_reward_ratio",),),
                says="{value:share} of the responses have a reward above 0 (at least {min:share} is healthy)",
            ),
        ),
        thresholds=(Threshold(name="min", default=0.05, meaning="share of rewards above 0", source=THUMB),),
        unless=(Condition(kind="level", reads=(("critic/score/min", "critic/rewards/min"),), limits={"min": 0.0}),),
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
        what="The policy does worse on validation than on what it trains on.",
        conditions=(
            Condition(
                kind="gap",
                reads=(SCORE, VALIDATED_REWARD),
                says="{metric} is {value:share} below training's {before} (at most {max:share} is healthy)",
            ),
            Condition(
                kind="gap",
                reads=(("reward/acc/mean",), VALIDATED_ACCURACY),
                says="{metric} is {value:share} below training's {before} (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(Threshold(name="max", default=0.2, meaning="gap as a share of the training reward", source=GUIDE),),
        window=2,
        min_steps=2,
        causes=(
            Cause(
                text="too few prompts, seen too often",
                advice="train on more prompts, fewer epochs, or stop at the best validation",
            ),
            Cause(text="validation has other or harder prompts", advice="compare the prompts of both"),
            Cause(
                text="the policy learnt to please the reward function alone",
                advice="read the best rewarded responses, and score them by hand",
            ),
        ),
    ),
    Rule(
        name="validation_fell",
        side="task",
        title="validation keeps what it gained",
        what="Validation has fallen below its best.",
        conditions=(
            Condition(
                kind="fall",
                reads=(("val-core/*/mean@#",),),
                limits={"max": "max", "by": 0.01},
                says="{metric} is {value:share} below its best, which was {before} (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(Threshold(name="max", default=0.2, meaning="share of the best that may be lost", source=GUIDE),),
        window=1,
        min_steps=3,
        causes=(
            Cause(
                text="the policy was broken by its updates",
                advice="go back to the best checkpoint, with a third of the learning rate",
                rule="reward_fell",
            ),
            Cause(
                text="overfitting", advice="stop at the best validation, or train on more prompts", rule="overfitting"
            ),
            TOO_FAST,
        ),
    ),
    Rule(
        name="component_fell",
        side="task",
        title="rewards by component",
        what="A component of the reward falls while the whole does not.",
        conditions=(
            Condition(
                kind="fall",
                reads=(("reward/*/mean",),),
                limits={"max": "max", "by": 0.05, "errors": 3.2},
                says="{metric} is {value:share} below its best, which was {before} (at most {max:share} is healthy)",
            ),
        ),
        thresholds=(
            Threshold(name="max", default=0.3, meaning="share of a component's best that may be lost", source=THUMB),
        ),
        min_steps=20,
        unless=(Condition(kind="fall", reads=(SCORE,), limits={"max": 0.1, "by": 0.01}),),
        causes=(
            Cause(
                text="the policy trades this component for another that pays more",
                advice="weigh the components anew, and read the best rewarded responses",
            ),
        ),
    ),
)
