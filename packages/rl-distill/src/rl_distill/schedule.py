"""Learning rate of each step."""

import math

from rl_distill.options import LearnerOptions


def learning_rate_at(step: int, options: LearnerOptions) -> float:
    """Learning rate of a step: linear warm-up, then constant, or a decay.

    Where min_learning_rate is 0, no step of the warm-up or decay has rate 0: warm-up over W steps gives step s the
    share s / W, and of a decay that ends at step D the share (D + 1 - s) / (D - W) is left at step s.

    Args:
        step: From 1.
        options: Peak rate, warm-up and decay.
    """
    peak, lowest = options.learning_rate, options.min_learning_rate
    if step <= options.warmup_steps:
        return peak * step / options.warmup_steps
    if options.decay_steps is None:
        return peak
    span = max(1, options.decay_steps - options.warmup_steps)
    left = max(0.0, options.decay_steps + 1 - step) / span
    if options.decay == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * min(1.0, left)))
    return lowest + (peak - lowest) * min(1.0, left)
