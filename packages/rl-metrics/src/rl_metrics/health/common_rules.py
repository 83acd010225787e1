"""What rules of several sides share: metrics by their names, conditions of how the reward does, causes."""

from rl_metrics.health.rules import Cause, Condition

SCORE = ("critic/score/mean", "critic/rewards/mean")
BEST_SCORE = ("critic/score/max", "critic/rewards/max")
WITHOUT_SPREAD = ("rollout/groups_without_spread_ratio",)
REFERENCE_KL = ("actor/reference_kl", "actor/kl_loss")
STALENESS = ("training/staleness/mean", "fully_async/staleness/mean")

SOLVED = Condition(
    kind="near_top",
    reads=(SCORE, BEST_SCORE),
    limits={"min": 0.95},
    window=10,
    says="nearly every reward is the best there is",
    can_do_with_one=True,
)
"""Nearly every reward is the best there is: nothing is left to learn."""

IMPROVES = Condition(kind="rises", reads=(SCORE,), limits={"max": 0.0}, window=30, says="the reward rises")
"""The reward rises now."""

IMPROVED = Condition(kind="rises", reads=(SCORE,), limits={"max": 0.0}, window=1_000_000, says="the reward has risen")
"""The reward has risen over the whole run."""

STANDS_STILL = Condition(
    kind="no_rise",
    reads=(SCORE, BEST_SCORE),
    limits={"min": 0.2},
    window=10,
    says="the reward has hardly risen: by {value:share} of what it could, from {before}",
    otherwise="the reward has risen",
    can_do_with_one=True,
)
"""The reward has hardly risen."""

NO_SPREAD = Condition(
    kind="level",
    reads=(WITHOUT_SPREAD,),
    limits={"max": 0.95},
    window=5,
    says="in {value:share} of the groups all rewards are equal",
)

OFF_POLICY = Condition(
    kind="level",
    reads=(STALENESS,),
    limits={"max": 0.5},
    window=5,
    says="rollouts are {value} versions old",
    otherwise="rollouts are of the newest weights",
)
"""Rollouts are of older weights than those that they train."""

KL_COEFFICIENT = ("actor/kl_coef",)

TOO_FAST = Cause(text="learning rate too high", advice="divide the learning rate by three")
TOO_MANY_UPDATES = Cause(
    text="too many updates on the same rollouts", advice="lower trainer.minibatches and trainer.epochs"
)
TOO_OLD = Cause(text="rollouts are too old", advice="lower the staleness", rule="off_policy")
REWARD_ZERO = Cause(
    text="every reward is 0",
    advice="call the reward function on a response that you know to be right",
    rule="reward_zero",
)
EQUAL_REWARDS = Cause(
    text="all rewards of each group are equal",
    advice="see the finding without_spread",
    rule="without_spread",
)
BROKEN = Cause(
    text="the policy was broken by its updates",
    advice="go back to a checkpoint from before, with a third of the learning rate",
    rule="reward_fell",
)
NOT_FINITE = Cause(
    text="the policy is no longer finite",
    advice="go back to a checkpoint from before, with a third of the learning rate",
    rule="lost_metrics",
)
RANDOM = Cause(
    text="the policy became random",
    advice="go back to a checkpoint from before, with a third of the learning rate",
    rule="entropy_rise",
)
PROVED_STALE = Cause(
    text="the engines do not have the learner's weights",
    advice="look at the weight proof, and restart the engines",
    rule="weights_proof",
)
STUCK = Cause(
    text="stale weights: the learner moves, and what the engine writes does not",
    advice="look at the weight proof, and restart the engines",
    sign=STANDS_STILL,
)
MISMATCH = Cause(
    text="engine and learner compute other probabilities",
    advice="run rl-metrics doctor on the run",
    rule="engine_mismatch",
)
CUT_SHORT = Cause(
    text="responses are cut before they have an answer",
    advice="raise rollout.max_response_tokens",
    rule="truncated",
)
DETERMINISTIC = Cause(
    text="the policy has become deterministic",
    advice="raise the entropy bonus or the temperature",
    rule="entropy_collapse",
)
