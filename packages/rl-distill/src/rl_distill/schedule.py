"""Learning rate schedule."""

import math

from rl_distill.options import LearnerOptions


def learning_rate_at(step: int, options: LearnerOptions) -> float:
    """Return the learning rate of a step: linear warm-up, then constant or decaying.

    With min_learning_rate 0, no step of the warm-up or decay has rate 0. In a warm-up over W steps, step s has the
    share s / W of the peak; in a linear decay that ends at step D, it has the share (D + 1 - s) / (D - W).

    Args:
        step: Optimizer step, from 1.
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
