"""Estimators of KL(policy || reference) from the logprobs of sampled tokens.

Each is a function of policy_logprobs and reference_logprobs, [T] float, that returns [T] estimates for tokens sampled
from the policy. The reference gets no gradient. As a reward or metric, k1 and k3 are unbiased. As a loss, their
expected gradients differ: k1's is 0 (only noise), k2's is that of KL(policy || reference), k3's is that of the forward
KL(reference || policy).

A name with "+" is a straight-through form: the estimator's value with k2's gradient. "k3+" thus reports an unbiased,
non-negative KL, and minimizes KL(policy || reference). k3 is bounded (`K3_BOUND`), but a gradient of k2 is not: it is
the log ratio, such as -100 for a token that the policy has made e^100 times less likely than the reference. Only
clip_grad bounds what one such token does to a step; k3 itself ignores it.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; gradients, Tang and Munos 2025, arXiv:2506.09477.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rl_core.errors import DataError, ShapeError
from rl_core.record_fields import converts_arguments
from rl_core.registry import Registry
from rl_distill.objectives.log_ratios import bounded, excess

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(policy_logprobs [T], reference_logprobs [T]) -> [T] estimates."""

K3_BOUND = 10.0
"""Maximum of k3, so that one outlier does not outweigh the batch; beyond it the gradient is 0."""


@converts_arguments
def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Log ratio log(policy / reference): unbiased, of either sign."""
    reference_logprobs = _constant(policy_logprobs, reference_logprobs)
    return policy_logprobs - reference_logprobs


@converts_arguments
def absolute(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Absolute log ratio |log(policy / reference)|: a distance, not an estimate of the KL."""
    reference_logprobs = _constant(policy_logprobs, reference_logprobs)
    return (policy_logprobs - reference_logprobs).abs()


@converts_arguments
def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log ratio: biased, but with the gradient of the KL."""
    reference_logprobs = _constant(policy_logprobs, reference_logprobs)
    return 0.5 * (policy_logprobs - reference_logprobs).square()


@converts_arguments
def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return r - 1 - log r with r = reference / policy: unbiased, never negative, at most `K3_BOUND`."""
    reference_logprobs = _constant(policy_logprobs, reference_logprobs)
    return excess(bounded(reference_logprobs - policy_logprobs)).clamp(max=K3_BOUND)


@converts_arguments
def straight_through(policy_logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KLEstimator) -> Tensor:
    """Combine an estimator's value with the gradient of k2."""
    gradient = k2(policy_logprobs, reference_logprobs)
    return estimator(policy_logprobs, reference_logprobs).detach() + gradient - gradient.detach()


KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator",
    {
        "k1": k1,
        "abs": absolute,
        "k2": k2,
        "k3": k3,
        "k1+": partial(straight_through, estimator=k1),
        "abs+": partial(straight_through, estimator=absolute),
        "k3+": partial(straight_through, estimator=k3),
    },
    group="rl_distill.kl_estimators",
)


def _constant(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Check the shapes, and detach the reference in case the caller did not."""
    if policy_logprobs.shape != reference_logprobs.shape:  # either packed or padded
        raise ShapeError(
            f"reference_logprobs must have the shape {list(policy_logprobs.shape)} of policy_logprobs; found "
            f"{list(reference_logprobs.shape)}. Score the same tokens."
        )
    if reference_logprobs.requires_grad and not policy_logprobs.requires_grad and torch.is_grad_enabled():
        raise DataError(
            "reference_logprobs require a gradient but policy_logprobs do not, so nothing would train. Are they "
            "swapped?"
        )
    return reference_logprobs.detach()
