"""The rule that finds a run whose validation or reward has stopped improving below its target."""

from collections.abc import Sequence
from dataclasses import replace

from rl_metrics.definitions.entries import GUIDE, THUMB
from rl_metrics.health.common_rules import (
    BEST_SCORE,
    CUT_SHORT,
    DETERMINISTIC,
    IMPROVES,
    NO_SPREAD,
    REWARD_ZERO,
    SCORE,
    SOLVED,
)
from rl_metrics.health.families import REWARDED
from rl_metrics.health.finding import TargetVerdict
from rl_metrics.health.rules import Cause, Condition, Rule, Threshold, condition
from rl_metrics.targets import TargetOptions

NO_GAIN = "{metric} is at best {value}, {window} validations ago it was at best {before} ({below} is good enough)"
ACCURACY = "val-core/*/acc/mean@#"


HAS_RISEN = condition(
    "risen", SCORE, BEST_SCORE, window=10, says="the reward rose before", can_do_with_one=True, min=0.1
)
"""The reward rose before it got stuck; `reward_flat` finds one that never rose."""


def _of_validation(name: str, *, sign: float = 1.0, below: float | str = "below") -> Condition:
    return condition("stuck", name, says=NO_GAIN, window=5, below=below, gain="gain", sign=sign)


PLATEAU = Rule(
    name="plateau",
    side="task",
    title="improves until its target",
    what="The policy has stopped improving below its target.",
    conditions=(
        _of_validation(ACCURACY),
        condition(
            "stuck",
            SCORE,
            BEST_SCORE,
            says="{metric} is at best {value}, {window} steps ago it was at best {before} ({share:share} of the way to "
            "the highest reward is good enough)",
            window=40,
            min_steps=60,
            needs=(HAS_RISEN,),
            unless=(SOLVED, IMPROVES),
            share="share",
            gain="gain",
        ),
    ),
    thresholds=(
        Threshold("below", 0.55, "validation accuracy that is good enough; trainer.target replaces it", GUIDE),
        Threshold("share", 0.5, "share of the way to the highest reward that is good enough", THUMB),
        Threshold("gain", 0.05, "gain over the earlier best that counts, as a share of it", THUMB),
    ),
    min_steps=6,
    families=REWARDED,
    causes=(
        REWARD_ZERO,
        Cause(
            "few responses are rewarded",
            "start with easier prompts, a warm start (SFT), or partial credit in the reward",
            sign=condition(
                "level",
                "rollout/positive_reward_ratio",
                says="only {value:share} of the responses have a reward above 0",
                min=0.2,
            ),
        ),
        Cause(
            "most groups have equal rewards, and teach nothing",
            "raise rollout.group_size, or set dynamic_sampling.filter to replace these groups",
            sign=NO_SPREAD,
        ),
        DETERMINISTIC,
        CUT_SHORT,
        Cause("learning rate too low, or too high to settle", "try a third and three times the learning rate"),
        Cause(
            "this policy can do no better on these prompts",
            "keep the best checkpoint (export --best), and set trainer.target or trainer.stop_when_no_better to end "
            "such runs",
        ),
    ),
)


def with_target(rules: Sequence[Rule], target: TargetOptions, verdict: TargetVerdict | None) -> tuple[Rule, ...]:
    """Return the rules with validation's plateau judged by the run's target; a reached target cannot be stuck."""
    if target.value is None:
        return tuple(rules)
    if verdict is not None and verdict.is_reached:
        return tuple(rule for rule in rules if rule.name != PLATEAU.name)
    sign = -1.0 if target.lower_is_better else 1.0
    aimed = _of_validation(target.metric or "val-core/*/mean@#", sign=sign, below=target.value)
    return tuple(
        replace(rule, conditions=(aimed, *rule.conditions[1:])) if rule.name == PLATEAU.name else rule for rule in rules
    )
