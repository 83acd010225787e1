"""Thresholds of the diagnosis of mismatches between engine and learner, with reasons."""

MIN_TOKENS = 30
"""With fewer nothing is said: a mean of 30 has a fifth of one value's spread."""

EXACT = 1e-3
"""Mean absolute difference, nats, that two float32 implementations explain: they differ by about 1e-5, and a weight
proof lets 1e-3 pass."""

ROUNDED = 0.03
"""The same where one side computes in bfloat16: eight bits of a logit of 8 to 16 are steps of 1/16, so a logit is off
by 0.016 on average, and a sum of layers by some times that."""

STALE_KL = 0.05
"""k3 KL, nats, up to which rollouts that are known to be old are as they should be: PPO's clip at 0.2 begins to bind
around it."""

PROBS_DIFF = 0.01
"""Mean difference of probabilities, where no logprobs were written; healthy runs stay below."""

CANARY_EXACT = 1e-3
"""Largest difference of a proof's canary in float32, nats: the proof's own bound."""

CANARY_ROUNDED = 0.3
"""The same in bfloat16."""

GROWTH = 3.0
"""A difference that is so many times its first value grows; noise of 30 tokens stays below 2."""

CERTAIN = 4.0
"""Standard deviations of a rank-sum statistic beyond which chance is left out: one run in 30,000."""

POSITION = 3.0
"""The first tokens differ so many times more than the later ones, at equal doubt: a wrong prompt does that; changed
weights and rounding do not."""

FIT = 0.5
"""Share of the squared difference that a line explains, from which on it is one."""

FIT_IF_CUT = 0.85
"""The same where the differences go one way: a cut sampling draws half a line by itself."""

ONE_SIDED = 0.15
"""At most this share of the difference is upwards: cut sampling has none, all else about half."""

ONE_SIDED_IF_SET = 0.4
"""The same where the settings cut the sampling, and another cause may lie on top."""

LOST_MASS = 0.4
"""Share of the ratios' distance from 1 that is a mean below 1. Ratios of full distributions have the mean 1, whatever
their cause."""

OUTLIER = 8.0
"""A token whose difference is so many times the median, at equal doubt, is one: noise of five standard deviations."""

OUTLIER_SHARE = 0.5
"""Outliers carry at least this share of the difference where a few tokens are the cause."""

MOST_OUTLIERS = 0.15
"""At most this share of the tokens are outliers: with more they are no exceptions."""

LEAST_SHARE = 0.1
"""Causes that account for less than this share of the difference are not named."""

LEAST_LEFT_OVER = 0.35
"""The same for what no cause explains, beside a cause that is named: fits leave a rest."""
