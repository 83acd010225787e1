"""Thresholds of the diagnosis of mismatches between engine and learner, with reasons."""

import math

import numpy as np

from rl_metrics.doctor.token_pairs import Floats

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

TYPICAL = 1.5
"""The median must grow by this multiple too, because a few tokens of other experts change a mean, but no median."""

CERTAIN = 4.0
"""Standard errors between two means that rule out chance: one run in 30,000 exceeds them by chance."""

ONE_SIDED = 0.15
"""Maximum share of upward differences for truncated sampling, which has none; other causes have about half."""

LOST_MASS = 0.4
"""Minimum share of k1 by which it exceeds k3 for truncated sampling; both are equal for full distributions."""


def grows(first: Floats, later: Floats) -> bool:
    """Return whether differences grow by GROWTH, and beyond chance."""
    error = math.hypot(first.std() / math.sqrt(len(first)), later.std() / math.sqrt(len(later)))
    is_certain = later.mean() - first.mean() >= CERTAIN * error and np.median(later) > TYPICAL * np.median(first)
    return bool(is_certain and later.mean() >= GROWTH * max(first.mean(), 1e-5))
