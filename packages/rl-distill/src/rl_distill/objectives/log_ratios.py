"""Log ratios of two policies' probabilities, [T] or [N]: a bound, and what is made from them."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios, summed ones too, are clamped to this before exp, which would overflow; beyond it the gradient is 0."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios of any shape, within `LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def excess(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r of log ratios log r, same shape: the k3 estimate, 0 where r is 1 and positive elsewhere."""
    return torch.expm1(log_ratio) - log_ratio
