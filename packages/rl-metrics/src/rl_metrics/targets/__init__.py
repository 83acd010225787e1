"""A target for validation, and the best validation of a run."""

from rl_metrics.targets.target import (
    EXACT,
    TargetOptions,
    Validated,
    best_of,
    best_to_keep,
    num_since_best,
    target_of,
    validations_of,
)

__all__ = [
    "EXACT",
    "TargetOptions",
    "Validated",
    "best_of",
    "best_to_keep",
    "num_since_best",
    "target_of",
    "validations_of",
]
