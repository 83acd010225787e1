"""Checks of policy losses and of whole policy objectives."""

from torch import Tensor

from rl_distill.learner import MetricSums, MicroBatch, Objective
from rl_distill.objectives.kl import k3
from rl_distill.objectives.policy_loss import PolicyLoss
from rl_distill.objectives.policy_objective import PolicyObjective, PolicyObjectiveOptions
from rl_distill.testing.examples import example_batch
from rl_distill.testing.rules import (
    Inputs,
    Subject,
    check_derivative,
    check_masked_tokens,
    check_micro_batches,
    check_zero_gradient,
    with_zeros,
)

ZERO_ADVANTAGE = (
    "zero advantages must give zero gradients (for an objective with a KL or entropy term pass is_regularized=True)"
)


def check_policy_loss(
    policy_loss: PolicyLoss, *, has_stop_gradient: bool = False, is_regularized: bool = False, seed: int = 0
) -> None:
    """Check a policy loss as `policy_objective` uses it; `check_objective` says what is checked.

    A loss that reads `PolicyTokens.selection` finds a random one, made over the global batch.

    Args:
        policy_loss: Its options bound.
        has_stop_gradient: True for losses that detach a part on purpose (CISPO): the gradient then is no derivative of
            the loss, and is not compared with finite differences.
        is_regularized: True for losses with a term that does not depend on the advantage (KL-Cov).
        seed: Of the example.

    Raises:
        ConformanceError: A rule is broken.
    """
    objective = PolicyObjective(options=PolicyObjectiveOptions(), policy_loss=policy_loss, kl=k3)
    check_objective(objective, has_stop_gradient=has_stop_gradient, is_regularized=is_regularized, seed=seed)


def check_objective(
    objective: Objective, *, has_stop_gradient: bool = False, is_regularized: bool = False, seed: int = 0
) -> None:
    """Check an objective of the policy.

    - The gradient is the loss's derivative, by finite differences in float64.
    - Zero advantages give zero gradients.
    - Nothing outside loss_mask counts, be it NaN or infinite.
    - Loss, gradients and metric sums add up over any micro-batches, in any order of rows.

    Args:
        objective: Called with an example's logprobs, entropy and micro-batches.
        has_stop_gradient: Leaves the first out.
        is_regularized: Leaves the second out, for objectives with a KL or entropy term.
        seed: Of the example.

    Raises:
        ConformanceError: A rule is broken.
    """

    def call(inputs: Inputs, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        policy_logprobs, entropy = inputs
        return objective(policy_logprobs, entropy, micro)

    subject, example = Subject(inputs=("policy_logprobs", "entropy"), call=call), example_batch(seed=seed)
    if not has_stop_gradient:
        check_derivative(subject, example)
    if not is_regularized:
        check_zero_gradient(subject, with_zeros(example, "advantages"), rule=ZERO_ADVANTAGE)
    check_masked_tokens(subject, example)
    check_micro_batches(subject, example)
