"""The rule of growing variance."""

from rl_metrics.definitions.entries import THUMB
from rl_metrics.health.common_rules import RANDOM, TOO_FAST
from rl_metrics.health.families import REWARDED
from rl_metrics.health.rules import Cause, Rule, Threshold, condition

SPREAD = (
    Rule(
        name="reward_spread",
        side="stability",
        title="the spread of rewards does not grow",
        what="The rewards within groups spread more and more: training becomes unstable.",
        conditions=(
            condition(
                "grown",
                "rollout/group_reward_std",
                says="{metric} is at {value}, from {before} at first ({times} times as much is too much)",
            ),
        ),
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
            RANDOM,
            TOO_FAST,
            Cause("a part of the reward has no bounds", "look at reward/*, and bound or scale that part"),
            Cause("some prompts are solved and others are not", "look at distribution/reward and the report's groups"),
        ),
    ),
)
