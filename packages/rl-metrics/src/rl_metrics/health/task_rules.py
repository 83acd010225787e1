"""Task rules: the policy learns what is rewarded."""

from functools import partial
from typing import Any

from rl_metrics.definitions.entries import BY_DESIGN, GUIDE, THUMB
from rl_metrics.health import common_rules as common
from rl_metrics.health.rules import REWARDED, Cause, Condition, Rule, Threshold, condition

BELOW_BEST = "{metric} is {value:share} below its best of {before} (at most {max:share} is healthy)"
ON_THE_WAY = "{metric} started at {before} and went at most {value:share} of the way to the highest reward"
ABOVE_START = "{metric} started at {before}, and its best is {value:share} above that"
BELOW_TRAINING = "{metric}: a gap of {value:share} to training's {before} (a new gap of at most {max:share} is healthy)"

SURE = 6
"""Number of validations from which a verdict on them is sure; fewer are judged more cautiously, and it is said."""

VALIDATED: dict[str, Any] = {"optional_last": True, "errors": 2.0, "held": 3.0, "sure": SURE}
"""Options of validations: the last column, of interval ends, is optional; standard errors of margin without it; three
in a row.

Greedy responses can be temporarily worse while the policy changes.
"""

EASIER = "start with easier prompts, a warm start (SFT), or partial credit in the reward"
TOO_HARD = Cause("the prompts are too hard for this policy", EASIER)

VALIDATED_REWARD = tuple(f"{part}/*/{name}/mean@#" for part in ("val-core", "val-aux") for name in ("reward", "score"))
UPPER_END = "val-core/*/mean@#/ci_high"
"""Upper end of a validation's confidence interval; a fall within it is no loss."""

REWARDED_SHARE = "rollout/positive_reward_ratio"
SOME_REWARDED = "{value:share} of the responses have a reward above 0"
NO_GAIN = "{{metric}} is at best {{value}}, {{window}} {} ago it was at best {{before}}"

HAS_RISEN = condition(
    "risen", common.SCORE, common.BEST_SCORE, window=10, says="the reward rose before", optional_last=True, min=0.1
)
"""The reward rose before it got stuck; `reward_flat` finds one that never rose."""


def stuck_validation(metric: str, *, sign: float = 1.0, below: float | str = "below") -> Condition:
    """Return the condition that validations no longer improve; `sign` = -1 for a metric that should fall."""
    says = f"{NO_GAIN.format('validations')} ({{below}} is good enough)"
    return condition("stuck", metric, says=says, window=5, below=below, gain="gain", sign=sign)


rule = partial(Rule, side="task")

TASK = (
    rule(
        name="reward_zero",
        title="some responses are rewarded",
        what="Every reward is 0.",
        severity="critical",
        conditions=(
            condition("zero", common.SCORE, common.BEST_SCORE, says="rewards" + common.WITHIN, optional_last=True),
        ),
        thresholds=(Threshold("max", 1e-9, "maximum reward that counts as 0", BY_DESIGN),),
        min_steps=5,
        unless=(common.SOLVED,),
        families=REWARDED,
        causes=(
            common.NOT_FINITE,
            common.BROKEN,
            common.CUT_SHORT,
            Cause(
                "the reward function does not find answers, or compares them with the wrong field",
                "call the reward function on a response known to be right, and read some of the run's responses",
            ),
            TOO_HARD,
        ),
    ),
    rule(
        name="reward_fell",
        title="the reward keeps its gains",
        what="The reward has fallen far below its best.",
        severity="critical",
        conditions=(condition("fall", common.SCORE, says=BELOW_BEST, max="max", by=0.01, errors=3.2),),
        thresholds=(Threshold("max", 0.25, "maximum loss, share of the best running median", THUMB),),
        causes=(
            common.NOT_FINITE,
            common.PROVED_STALE,
            common.MISMATCH,
            common.CUT_SHORT,
            common.DETERMINISTIC,
            Cause(
                "rollouts are too old for steps of this size",
                "lower schedule.max_staleness or schedule.sync_every, or the learning rate",
                rule="off_policy",
            ),
            Cause(
                "learning rate too high", "resume from a checkpoint before the fall with a third of the learning rate"
            ),
            Cause("the reward function changed, or fails", "look at its errors and at reward/*"),
        ),
    ),
    rule(
        name="reward_flat",
        title="the reward has risen since the start",
        what="The reward has not risen since the start.",
        conditions=(
            condition("no_rise", common.SCORE, common.BEST_SCORE, says=ON_THE_WAY),
            condition("no_rise", common.SCORE, says=ABOVE_START),
        ),
        thresholds=(Threshold("min", 0.1, "minimum gain, share of the way to the highest reward", THUMB),),
        min_steps=30,
        unless=(common.SOLVED, common.IMPROVED),
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
                sign=common.NO_SPREAD,
            ),
            common.PROVED_STALE,
            common.MISMATCH,
            Cause("rollouts are not from the trained policy", "run rl-metrics doctor on the run", rule="off_policy"),
            Cause(
                "the KL penalty keeps the policy at the reference", "lower algorithm.kl_coefficient", rule="policy_held"
            ),
            common.DETERMINISTIC,
            common.CUT_SHORT,
            Cause("learning rate too high", "divide the learning rate by three", rule="reward_fell"),
            common.TOO_SLOW,
            TOO_HARD,
        ),
    ),
    rule(
        name="reward_rare",
        title="share of positive rewards",
        what="Hardly any response is rewarded.",
        conditions=(condition("level", REWARDED_SHARE, says=f"{SOME_REWARDED} (at least {{min:share}} is healthy)"),),
        thresholds=(Threshold("min", 0.05, "share of rewards above 0", THUMB),),
        unless=(condition("level", ("critic/score/min", "critic/rewards/min"), min=0.0),),
        families=REWARDED,
        causes=(common.REWARD_ZERO, common.CUT_SHORT, common.BROKEN, TOO_HARD),
    ),
    rule(
        name="overfitting",
        title="validation against training",
        what="The policy has become worse on validation than on its training prompts.",
        conditions=tuple(
            condition("gap", *names, UPPER_END, says=BELOW_TRAINING, at_end=limit == "end_max", max=limit, **VALIDATED)
            for limit in ("max", "end_max")
            for names in ((common.SCORE, VALIDATED_REWARD), ("reward/acc/mean", "val-core/*/acc/mean@#"))
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
    rule(
        name="validation_fell",
        title="validation keeps its gains",
        what="Validation has fallen below its best.",
        conditions=(
            condition("fall", "val-core/*/mean@#", UPPER_END, says=BELOW_BEST, max="max", by=0.01, **VALIDATED),
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
            common.TOO_FAST,
            Cause(
                "the validation data or its ground truths are wrong, or changed",
                "score some of its responses by hand, and compare prompts.validation with prompts.train",
            ),
        ),
    ),
    rule(
        name="component_fell",
        title="rewards by component",
        what="A component of the reward falls while the total does not.",
        conditions=(condition("fall", "reward/*/mean", says=BELOW_BEST, max="max", by=0.05, errors=3.2),),
        thresholds=(Threshold("max", 0.3, "maximum loss, share of the component's best", THUMB),),
        min_steps=20,
        unless=(condition("fall", common.SCORE, max=0.1, by=0.01),),
        families=REWARDED,
        causes=(
            Cause(
                "the policy trades this component for another that pays more",
                "change the components' weights, and read the responses with the highest rewards",
            ),
        ),
    ),
    rule(
        name="plateau",
        title="improves until its target",
        what="The policy has stopped improving below its target.",
        conditions=(
            stuck_validation("val-core/*/acc/mean@#"),
            condition(
                "stuck",
                common.SCORE,
                common.BEST_SCORE,
                says=f"{NO_GAIN.format('steps')} ({{share:share}} of the way to the highest reward is good enough)",
                window=40,
                min_steps=60,
                needs=(HAS_RISEN,),
                unless=(common.SOLVED, common.IMPROVES),
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
            common.REWARD_ZERO,
            Cause(
                "few responses are rewarded",
                EASIER,
                sign=condition("level", REWARDED_SHARE, says=f"only {SOME_REWARDED}", min=0.2),
            ),
            Cause(
                "most groups have equal rewards, and teach nothing",
                "raise rollout.group_size, or set dynamic_sampling.filter to replace these groups",
                sign=common.NO_SPREAD,
            ),
            common.DETERMINISTIC,
            common.CUT_SHORT,
            Cause("learning rate too low, or too high to settle", "try a third and three times the learning rate"),
            Cause(
                "this policy can do no better on these prompts",
                "keep the best checkpoint (export --best), and set trainer.target or trainer.stop_when_no_better to "
                "end such runs",
            ),
        ),
    ),
)
