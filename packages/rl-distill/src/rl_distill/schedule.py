"""Learning rate of each step."""

from rl_distill.options import LearnerOptions


def learning_rate_at(step: int, options: LearnerOptions) -> float:
    """Learning rate of a step: linear warm-up, then constant, or linear decay.

    No step of the warm-up or decay has rate 0: warm-up over W steps gives step s the share s / W, and decay
    that ends at step D gives it (D + 1 - s) / (D - W); after D the rate is 0.

    Args:
        step: From 1.
        options: Peak rate, warm-up and decay.
    """
    if step <= options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    if options.decay_steps is None:
        return options.learning_rate
    span = max(1, options.decay_steps - options.warmup_steps)
    return options.learning_rate * max(0.0, options.decay_steps + 1 - step) / span
