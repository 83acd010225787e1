"""Estimators of KL(policy || reference) from the logprobs of sampled tokens.

Each is a function of policy_logprobs and reference_logprobs, [T] float, that returns [T] estimates for tokens sampled
from the policy. The reference gets no gradient. As a reward or metric, k1 and k3 are unbiased. As a loss, their
expected gradients differ: k1's is 0 (only noise), k2's is that of KL(policy || reference), k3's is that of the forward
KL(reference || policy).

A name with "+" is a straight-through form: the estimator's value with k2's gradient. "k3+" thus reports an unbiased,
non-negative KL, and minimizes KL(policy || reference). k3 is bounded (`K3_BOUND`), but a gradient of k2 is not: it is
the log ratio, such as -100 for a token that the policy has made e^100 times less likely than the reference. Only
clip_grad bounds what one such token does to a step; k3 itself ignores it.

The coefficient of the KL is fixed, or adapted to keep the KL at a target.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; gradients, Tang and Munos 2025, arXiv:2506.09477; adaptive
coefficient, Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl_core.errors import CheckpointError, DataError, SettingsError, ShapeError
from rl_core.record_fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    converts_arguments,
    settings_record,
)
from rl_core.registry import Registry

LOG_RATIO_BOUND = 20.0
"""Bound of log ratios and their sums before exp, which would overflow; beyond it the gradient is 0."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log ratios of any shape to `LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def excess(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r of log ratios log r: the k3 estimate, 0 where r is 1 and positive elsewhere."""
    return torch.expm1(log_ratio) - log_ratio


KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(policy_logprobs [T], reference_logprobs [T]) -> [T] estimates."""

K3_BOUND = 10.0
"""Maximum of k3, so that one outlier does not outweigh the batch; beyond it the gradient is 0."""


@converts_arguments
def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Log ratio log(policy / reference): unbiased, of either sign."""
    return _log_ratio(policy_logprobs, reference_logprobs)


@converts_arguments
def absolute(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Absolute log ratio |log(policy / reference)|: a distance, not an estimate of the KL."""
    return _log_ratio(policy_logprobs, reference_logprobs).abs()


@converts_arguments
def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log ratio: biased, but with the gradient of the KL."""
    return 0.5 * _log_ratio(policy_logprobs, reference_logprobs).square()


@converts_arguments
def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return r - 1 - log r with r = reference / policy: unbiased, never negative, at most `K3_BOUND`."""
    return excess(bounded(-_log_ratio(policy_logprobs, reference_logprobs))).clamp(max=K3_BOUND)


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


def _log_ratio(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Check the shapes, and return log(policy / reference) without gradient of the reference."""
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
    return policy_logprobs - reference_logprobs.detach()


ERROR_BOUND = 0.2
"""Maximum relative error that one update takes into account."""


@settings_record
class AdaptiveKL:
    """A KL coefficient and its controller; immutable, so that a repeated step adapts only once.

    Attributes:
        coefficient: Current coefficient.
        target: Target KL, in nats per token; None leaves the coefficient fixed.
        horizon: Trajectories over which an error of 20 % changes the coefficient by 20 %.
    """

    coefficient: NonNegativeFloat
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        """Check that there is something to adapt.

        Raises:
            SettingsError: The coefficient is 0, and there is a target.
        """
        if self.target is not None and self.coefficient == 0.0:
            raise SettingsError(
                "coefficient of the KL control must be above 0 if there is a target, since adapting multiplies it; "
                f"found 0 with target = {self.target}. Set a positive coefficient, or target = None."
            )

    @converts_arguments
    def adapted(self, kl: float, *, num_trajectories: NonNegativeInt) -> "AdaptiveKL":
        """Return the controller after a batch.

        Args:
            kl: Mean KL to the reference on the batch, in nats per token; a non-finite value changes nothing.
            num_trajectories: Number of trajectories in the batch.

        Raises:
            SettingsError: num_trajectories is below 0.
        """
        if self.target is None or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -ERROR_BOUND), ERROR_BOUND)
        factor = 1.0 + error * min(num_trajectories / self.horizon, 1.0)
        return replace(self, coefficient=self.coefficient * factor)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"coefficient": self.coefficient}

    def restored(self, state: Mapping[str, float]) -> "AdaptiveKL":
        """Restore the coefficient from a `state`; a fixed coefficient is kept, so that the user's settings apply.

        Raises:
            CheckpointError: The state has no usable coefficient.
        """
        if self.target is None:
            return self
        coefficient = state.get("coefficient")
        if not isinstance(coefficient, int | float) or not (math.isfinite(coefficient) and coefficient > 0.0):
            raise CheckpointError(f"the state of an adaptive KL must have a coefficient above 0; found {dict(state)}.")
        return replace(self, coefficient=float(coefficient))
