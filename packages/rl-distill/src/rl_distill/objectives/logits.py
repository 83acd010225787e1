"""Logprobs and entropy from full logits, in plain torch.

The Megatron learner has vocabulary-parallel versions of its own; these are the oracle for them.
"""

import torch
from torch import Tensor

from rl_core.errors import ShapeError


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Natural-log probability of each label.

    Args:
        logits: [..., V] float.
        labels: [...] int64 in [0, V).

    Returns:
        [...] logprobs in the logits' dtype.

    Raises:
        ShapeError: labels do not have the logits' leading shape.
    """
    if logits.ndim < 1 or labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels must have the logits' leading shape; logits are {list(logits.shape)}, labels {list(labels.shape)}."
        )
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of the softmax in nats.

    Args:
        logits: [..., V] float; -inf bars an entry.

    Returns:
        [...] entropies in the logits' dtype.
    """
    # A barred entry has probability 0; 0 * -inf would be NaN, in the gradient too.
    finite = logits.masked_fill(logits.isneginf(), 0.0)
    return logits.logsumexp(-1) - (torch.softmax(logits, -1) * finite).sum(-1)
