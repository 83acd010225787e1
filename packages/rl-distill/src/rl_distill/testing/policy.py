"""Conformance checks of policy losses and policy objectives."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from rl_distill.learner import MetricSums, MicroBatch, Objective
from rl_distill.objectives.kl import k3
from rl_distill.objectives.policy import PolicyObjective, PolicyObjectiveOptions
from rl_distill.objectives.policy_loss import PolicyLoss, PolicyTokens, TokenLosses
from rl_distill.objectives.ragged import row_index
from rl_distill.testing.examples import ExampleBatch, example_batch, with_columns
from rl_distill.testing.results import check_token_losses, check_untouched, copies_of
from rl_distill.testing.rules import (
    Inputs,
    Subject,
    check_derivative,
    check_direction,
    check_masked_tokens,
    check_micro_batches,
    check_zero_gradient,
    evaluate,
    with_zeros,
)

ZERO_ADVANTAGE = (
    "zero advantages must give zero gradients (for an objective with a KL or entropy term, pass is_regularized=True)"
)

SIGN = (
    "raising a token's logprob must lower the loss if its advantage is positive, and must not if it is negative "
    "(to skip this check, pass follows_advantages=False)"
)

SIGN_LENGTHS = (9, 7, 8, 9)
"""Lengths at which tokens with either sign of the advantage include selected and unselected trained tokens."""


def check_policy_loss(
    policy_loss: PolicyLoss,
    *,
    has_stop_gradient: bool = False,
    is_regularized: bool = False,
    follows_advantages: bool = True,
    seed: int = 0,
) -> None:
    """Check a policy loss as used by `policy_objective`, with the rules of `check_objective`.

    In addition, the loss must return `TokenLosses` with [T] tensors and must not change its `PolicyTokens`.
    `PolicyTokens.selection` is a random selection over the global batch.

    Args:
        policy_loss: Policy loss with its options bound.
        has_stop_gradient: True for losses that detach a part on purpose (CISPO). Their gradient is not the derivative
            of the loss, so it is not compared with finite differences.
        is_regularized: True for losses with a term that does not depend on the advantage (KL-Cov).
        follows_advantages: False for losses whose gradient intentionally has a different sign than the advantage.
        seed: Seed of the example batch.

    Raises:
        ConformanceError: The loss breaks a rule.
    """
    objective = PolicyObjective(options=PolicyObjectiveOptions(), policy_loss=_watched(policy_loss), kl=k3)
    check_objective(
        objective,
        has_stop_gradient=has_stop_gradient,
        is_regularized=is_regularized,
        follows_advantages=follows_advantages,
        seed=seed,
    )


def check_objective(
    objective: Objective,
    *,
    has_stop_gradient: bool = False,
    is_regularized: bool = False,
    follows_advantages: bool = True,
    seed: int = 0,
) -> None:
    """Check an objective of the policy.

    - It returns (loss, metric sums) and does not change its inputs.
    - The gradient is the derivative of the loss, by finite differences in float64.
    - Zero advantages give zero gradients.
    - Raising a token's logprob lowers the loss if its advantage is positive and raises it if negative. This is checked
      on-policy, with equal advantages within each trajectory, and without terms that do not depend on them.
    - Tokens outside loss_mask do not affect the result, even if they are NaN or infinite.
    - Loss, gradients and metric sums add up over any split into micro-batches, in any order of rows.

    Args:
        objective: Objective, called with logprobs, entropy and micro-batches of an example.
        has_stop_gradient: True to skip the derivative check.
        is_regularized: True to skip the zero-advantage check, for objectives with a KL or entropy term.
        follows_advantages: False to skip the sign check.
        seed: Seed of the example batch.

    Raises:
        ConformanceError: The objective breaks a rule.
    """
    subject, example = _subject(objective), example_batch(seed=seed)
    if not has_stop_gradient:
        check_derivative(subject, example)
    if not is_regularized:
        check_zero_gradient(subject, with_zeros(example, "advantages"), rule=ZERO_ADVANTAGE)
    if follows_advantages:
        _check_sign(subject, example_batch(lengths=SIGN_LENGTHS, seed=seed))
    check_masked_tokens(subject, example)
    check_micro_batches(subject, example)


def _subject(objective: Objective) -> Subject:
    def call(inputs: Inputs, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        policy_logprobs, entropy = inputs
        return objective(policy_logprobs, entropy, micro)

    return Subject(inputs=("policy_logprobs", "entropy"), call=call)


def _check_sign(subject: Subject, example: ExampleBatch) -> None:
    """Check that the gradient from advantages has their sign while the policy equals the old policy."""
    mask, offsets = example.micro.columns["loss_mask"], example.micro.offsets
    is_even = row_index(offsets, num_tokens=len(mask)) % 2 == 0
    advantages = torch.where(mask, torch.where(is_even, 1.0, -0.5), 0.0).double()
    old = torch.where(mask, example.policy_logprobs, 0.0)
    columns = {"advantages": advantages, "old_logprobs": old, "rollout_logprobs": old}
    on_policy = replace(example, micro=with_columns(example.micro, columns))
    gradient = evaluate(subject, on_policy)[1][0] - evaluate(subject, with_zeros(on_policy, "advantages"))[1][0]
    check_direction(gradient, -advantages, rule=SIGN)


def _watched(policy_loss: PolicyLoss) -> PolicyLoss:
    """Return the loss with a check of its result and inputs at every call."""

    def call(tokens: PolicyTokens) -> TokenLosses:
        copies = copies_of(_tensors_of(tokens))
        found: object = policy_loss(tokens)
        check_untouched(copies, _tensors_of(tokens), who="the policy loss")
        check_token_losses(found, num_tokens=tokens.num_tokens)
        return found  # type: ignore[return-value]  # checked

    return call


def _tensors_of(tokens: PolicyTokens) -> dict[str, Tensor]:
    columns = {column.name: getattr(tokens, column.name) for column in fields(tokens)}
    return {name: values for name, values in columns.items() if values is not None}
