"""Metric names, reward conditions and causes shared by rules of several sides."""

from rl_metrics.health.rules import Cause, Condition, condition

SCORE = ("critic/score/mean", "critic/rewards/mean")
BEST_SCORE = ("critic/score/max", "critic/rewards/max")
WITHOUT_SPREAD = ("rollout/groups_without_spread_ratio",)
REFERENCE_KL = ("actor/reference_kl", "actor/kl_loss")
OVER_RUN = 1_000_000
"""Window of more steps than any run."""

STALENESS = ("training/staleness/mean", "fully_async/staleness/mean")

HEALTHY = "{metric} is at {value} (at most {max} is healthy)"
HEALTHY_NATS = "{metric} is at {value} nats (at most {max} is healthy)"
IN_RANGE = "{metric} is at {value} (from {min} to {max} is healthy)"
OVER_THE_RUN = "{metric} is {value} on average over the run"
MANY_TIMES = "{{metric}} is at {{value}}{}, from {{before}} at first ({{times}} times as much is too much)"
WITHIN = " are within ±{value} in the last {window} steps"


def share_of(whole: str, prefix: str = "", *, bound: str = "at most {max:share}") -> str:
    """Return the text of a condition on a share of a whole, such as "tokens"."""
    return f"{{metric}}: {prefix}{{value:share}} of the {whole} ({bound} is healthy)"


SOLVED = condition(
    "near_top", SCORE, BEST_SCORE, window=10, says="the reward is near its best so far", optional_last=True, min=0.95
)
"""The reward is near the maximum so far, or near the best mean without a maximum: little is left to learn."""

IMPROVES = condition("rises", SCORE, window=30, says="the reward rises", max=0.0)
"""The reward is rising."""

IMPROVED = condition("rises", SCORE, window=OVER_RUN, says="the reward has risen", max=0.0)
"""The reward has risen over the whole run."""

HAS_GAINED = condition(
    "risen",
    SCORE,
    BEST_SCORE,
    window=5,
    says="the reward has risen by {value:share} of the possible gain, from {before}",
    optional_last=True,
    min=0.25,
)
"""The reward is well above its start; in a short run, the trend may still be insignificant."""

STANDS_STILL = condition(
    "no_rise",
    SCORE,
    BEST_SCORE,
    window=10,
    says="the reward has hardly risen: by {value:share} of the possible gain, from {before}",
    otherwise="the reward has risen",
    optional_last=True,
    min=0.2,
)
"""The reward has hardly risen."""

NO_SPREAD = condition(
    "level", WITHOUT_SPREAD, window=5, says="in {value:share} of the groups all rewards are equal", max=0.95
)

OFF_POLICY = condition(
    "level",
    STALENESS,
    window=5,
    says="rollouts are {value} versions old",
    otherwise="rollouts are from the newest weights",
    max=0.5,
)
"""Rollouts come from older weights than those they train."""


def kl_coefficient(above: float) -> Condition:
    """Return the condition that the coefficient of the KL penalty is above a value."""
    return condition("level", "actor/kl_coef", window=5, says="{metric} is {value}; up to 0.02 is usual", max=above)


LOSS = ("actor/pg_loss", "actor/loss")

UNMOVED = condition(
    "zero",
    "actor/ppo_kl",
    says="{metric} is 0: with one update a batch every ratio is 1, so that it cannot tell how far the policy moves",
    max=1e-6,
)
"""Old and trained policy are equal, because each batch has one update, which its loss comes before."""

LESS_KL = "divide algorithm.kl_coefficient by ten"
TOO_FAST = Cause("learning rate too high", "divide the learning rate by three")
TOO_SLOW = Cause("learning rate too low", "multiply the learning rate by three")
TOO_MANY_UPDATES = Cause("too many updates on the same rollouts", "lower trainer.minibatches and trainer.epochs")
TOO_OLD = Cause("rollouts are too old", "lower the staleness", rule="off_policy")
REWARD_ZERO = Cause("every reward is 0", "call the reward function on a response known to be right", rule="reward_zero")
EQUAL_REWARDS = Cause("all rewards of each group are equal", "see the finding without_spread", rule="without_spread")
RESUME = "resume from an earlier checkpoint with a third of the learning rate"
BROKEN = Cause("the policy was broken by its updates", RESUME, rule="reward_fell")
NOT_FINITE = Cause("the policy is no longer finite", RESUME, rule="lost_metrics")
RANDOM = Cause("the policy became random", RESUME, rule="entropy_rise")
RESTART = "check the weight proof, and restart the engines"
PROVED_STALE = Cause("the engines do not have the learner's weights", RESTART, rule="weights_proof")
STUCK = Cause(
    "stale weights: the learner's policy changes, but the engine's responses do not", RESTART, sign=STANDS_STILL
)
MISMATCH = Cause(
    "engine and learner compute different probabilities", "run rl-metrics doctor on the run", rule="engine_mismatch"
)
CUT_SHORT = Cause("responses are cut before they have an answer", "raise rollout.max_response_tokens", rule="truncated")
DETERMINISTIC = Cause(
    "the policy has become deterministic", "raise the entropy bonus or the temperature", rule="entropy_collapse"
)
