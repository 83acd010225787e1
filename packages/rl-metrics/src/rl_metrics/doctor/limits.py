"""What the doctor takes for wrong, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchLimits:
    """Of the difference of engine and learner.

    Attributes:
        min_tokens: With fewer nothing is said: a mean of 30 has a fifth of one value's spread.
        exact: Mean absolute difference, nats, that two float32 implementations explain: they differ by about 1e-5, and
            a weight proof lets 1e-3 pass.
        rounded: The same where one side computes in bfloat16: eight bits of a logit of 8 to 16 are steps of 1/16, so
            a logit is off by 0.016 on average, and a sum of layers by some times that.
        stale_kl: k3 KL, nats, up to which rollouts that are known to be old are as they should be: PPO's clip at
            0.2 begins to bind around it.
        probs_diff: Mean difference of probabilities, where no logprobs were written; healthy runs stay below.
        canary_exact: Largest difference of a proof's canary in float32, nats: the proof's own bound.
        canary_rounded: The same in bfloat16.
        growth: A difference that is so many times its first value grows; noise of 30 tokens stays below 2.
        certain: Standard deviations of a rank-sum statistic beyond which chance is left out: one run in 30,000.
        position: The first tokens differ so many times more than the later ones, at equal doubt: a wrong prompt does
            that; changed weights and rounding do not.
        fit: Share of the squared difference that a line explains, from which on it is one.
        fit_if_cut: The same where the differences go one way: a cut sampling draws half a line by itself.
        one_sided: At most this share of the difference is upwards: cut sampling has none, all else about half.
        one_sided_if_set: The same where the settings cut the sampling, and another cause may lie on top.
        lost_mass: Share of the ratios' distance from 1 that is a mean below 1. Ratios of full distributions have the
            mean 1, whatever their cause.
        outlier: A token whose difference is so many times the median, at equal doubt, is one: noise of five standard
            deviations.
        outlier_share: Outliers carry at least this share of the difference where a few tokens are the cause.
        most_outliers: At most this share of the tokens are outliers: with more they are no exceptions.
        least_share: Causes that account for less than this share of the difference are not named.
        least_left_over: The same for what no cause explains, beside a cause that is named: fits leave a rest.
    """

    min_tokens: int = 30
    exact: float = 1e-3
    rounded: float = 0.03
    stale_kl: float = 0.05
    probs_diff: float = 0.01
    canary_exact: float = 1e-3
    canary_rounded: float = 0.3
    growth: float = 3.0
    certain: float = 4.0
    position: float = 3.0
    fit: float = 0.5
    fit_if_cut: float = 0.85
    one_sided: float = 0.15
    one_sided_if_set: float = 0.4
    lost_mass: float = 0.4
    outlier: float = 8.0
    outlier_share: float = 0.5
    most_outliers: float = 0.15
    least_share: float = 0.1
    least_left_over: float = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLimits:
    """What counts as growth of memory.

    Attributes:
        warm_up: Share of the steps that are left out: caches, pools and compiled code fill up then.
        warm_up_steps: At least so many are left out.
        min_points: With fewer measurements after it nothing is said: of eight a trend by chance is still one in 1,000.
        certain: Standard deviations of the Mann-Kendall statistic beyond which chance is left out.
        least_gb: Growth over the steps that were looked at, GiB, below which nothing is said.
        least_share: The same as a share of the owner's memory at their start: heaps breathe by some per cent.
        least_late: The second half's slope is at least this share of the whole's: a cache that fills up slows down.
    """

    warm_up: float = 0.2
    warm_up_steps: int = 30
    min_points: int = 8
    certain: float = 3.0
    least_gb: float = 0.02
    least_share: float = 0.1
    least_late: float = 0.3
