"""Thresholds of the diagnosis of mismatches between engine and learner, with reasons."""

MIN_TOKENS = 30
"""Minimum number of tokens for a diagnosis: a mean of 30 has a fifth of one value's spread."""

EXACT = 1e-3
"""Mean absolute difference, in nats, that two float32 implementations explain.

They differ by about 1e-5, and a weight proof accepts 1e-3.
"""

ROUNDED = 0.03
"""The same if one side computes in bfloat16.

With eight bits, logits from 8 to 16 have steps of 1/16, so a logit is off by 0.016 on average, and a sum over layers by
a few times that.
"""

STALE_KL = 0.05
"""Maximum k3 KL, in nats, that is expected of rollouts known to be old; PPO's clip at 0.2 starts to bind around it."""

PROBS_DIFF = 0.01
"""Maximum mean difference of probabilities in healthy runs, if no logprobs were recorded."""

CANARY_EXACT = 1e-3
"""Maximum difference of a proof's canary in float32, in nats; the proof's own bound."""

CANARY_ROUNDED = 0.3
"""The same in bfloat16."""

GROWTH = 3.0
"""A difference grows if it reaches this multiple of its first value; noise of 30 tokens stays below 2."""

CERTAIN = 4.0
"""Standard deviations of a rank-sum statistic that rule out chance: one run in 30,000 exceeds them by chance."""

POSITION = 3.0
"""Minimum ratio of the first tokens' difference to that of later ones, at equal doubt, for a wrong prompt.

Changed weights and rounding stay below.
"""

FIT = 0.5
"""Minimum share of the squared difference that a line must explain."""

FIT_IF_CUT = 0.85
"""The same if the differences have one sign: truncated sampling alone explains half a line."""

ONE_SIDED = 0.15
"""Maximum share of upward differences for truncated sampling, which has none; other causes have about half."""

ONE_SIDED_IF_SET = 0.4
"""The same if the settings truncate sampling, because another cause may add to it."""

LOST_MASS = 0.4
"""Minimum share of the ratios' distance from 1 that comes from a mean below 1.

Ratios of full distributions have a mean of 1, whatever the cause.
"""

OUTLIER = 8.0
"""Ratio of an outlying difference to the median, at equal doubt: noise of five standard deviations."""

OUTLIER_SHARE = 0.5
"""Minimum share of the difference in outliers if a few tokens are the cause."""

MOST_OUTLIERS = 0.15
"""Maximum share of tokens that are outliers; more are not exceptions."""

LEAST_SHARE = 0.1
"""Minimum share of the difference for a cause to be named."""

LEAST_LEFT_OVER = 0.35
"""The same for the unexplained rest if another cause is named, because fits leave a rest."""
