"""Log ratios of two policies' probabilities, of any shape: their bound, and the k3 estimate."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Bound of log ratios and their sums before exp, which would overflow; beyond it the gradient is 0."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log ratios of any shape to `LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def excess(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r of log ratios log r: the k3 estimate, 0 where r is 1 and positive elsewhere."""
    return torch.expm1(log_ratio) - log_ratio
