"""Conformance checks of policy losses, and of the objectives of policy and critic."""

import torch

from rl_distill.learner import Objective, ValueLoss
from rl_distill.objectives.kl import k3
from rl_distill.objectives.policy import PolicyObjective, PolicyObjectiveOptions
from rl_distill.objectives.policy_loss import PolicyLoss, PolicyTokens, TokenLosses
from rl_distill.objectives.ragged import row_index
from rl_distill.testing.rules import (
    ConformanceError,
    ExampleBatch,
    Subject,
    check_direction,
    check_rules,
    described,
    evaluate,
    example_batch,
    unchanged,
    with_changes,
)

POLICY_LOSS_RESULT = (
    "a policy loss must return TokenLosses(losses=..., diagnostics={...}) with float losses [T] and tensors [T] by "
    "metric name"
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

    def checked(tokens: PolicyTokens) -> TokenLosses:
        with unchanged(tokens, who="the policy loss"):
            losses = policy_loss(tokens)
        _check_token_losses(losses, num_tokens=tokens.num_tokens)
        return losses

    check_objective(
        PolicyObjective(options=PolicyObjectiveOptions(), policy_loss=checked, kl=k3),
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
    subject, example = Subject(inputs=("policy_logprobs", "entropy"), call=objective), example_batch(seed=seed)
    at_zero = None if is_regularized else _without_advantages(example)
    check_rules(subject, example, at_zero=at_zero, rule=ZERO_ADVANTAGE, has_derivative=not has_stop_gradient)
    if follows_advantages:
        _check_sign(subject, example_batch(lengths=SIGN_LENGTHS, seed=seed))


def check_value_loss(value_loss: ValueLoss, *, seed: int = 0) -> None:
    """Check an objective of the critic.

    - It returns (loss, metric sums) and does not change its inputs.
    - The gradient is the derivative of the loss, by finite differences in float64.
    - A critic that predicts the returns receives no gradient.
    - While the critic equals the old critic, values above their return fall and values below it rise.
    - Tokens outside loss_mask do not affect the result, even if they are NaN or infinite.
    - Loss, gradients and metric sums add up over any split into micro-batches, in any order of rows.

    Args:
        value_loss: Critic objective, called with values and micro-batches of an example.
        seed: Seed of the example batch.

    Raises:
        ConformanceError: The objective breaks a rule.
    """
    subject, example = Subject(inputs=("values",), call=value_loss), example_batch(seed=seed)
    values, columns = example.inputs["values"], example.micro.columns
    perfect = with_changes(example, returns=values)
    check_rules(subject, example, at_zero=perfect, rule="a critic that predicts the returns must receive no gradient")
    on_policy = with_changes(example, values=torch.where(columns["loss_mask"], values, 0.0))
    above = torch.where(columns["loss_mask"], values - columns["returns"], 0.0)
    check_direction(evaluate(subject, on_policy)[1][0], above, rule="a value must move toward its return")


def _check_sign(subject: Subject, example: ExampleBatch) -> None:
    """Check that the gradient from advantages has their sign while the policy equals the old policy."""
    mask, offsets = example.micro.columns["loss_mask"], example.micro.offsets
    is_even = row_index(offsets, num_tokens=len(mask)) % 2 == 0
    advantages = torch.where(mask, torch.where(is_even, 1.0, -0.5), 0.0).double()
    old = torch.where(mask, example.inputs["policy_logprobs"], 0.0)
    on_policy = with_changes(example, advantages=advantages, old_logprobs=old, rollout_logprobs=old)
    gradient = evaluate(subject, on_policy)[1][0] - evaluate(subject, _without_advantages(on_policy))[1][0]
    check_direction(gradient, -advantages, rule=SIGN)


def _without_advantages(example: ExampleBatch) -> ExampleBatch:
    return with_changes(example, advantages=torch.zeros_like(example.micro.columns["advantages"]))


def _check_token_losses(losses: object, *, num_tokens: int) -> None:
    """Check that a result is `TokenLosses`, a record that checks its types, of num_tokens tokens."""
    if not isinstance(losses, TokenLosses):
        raise ConformanceError(f"{POLICY_LOSS_RESULT}; found {described(losses)}.")
    if not losses.losses.is_floating_point() or losses.losses.shape != (num_tokens,):
        raise ConformanceError(f"{POLICY_LOSS_RESULT}, T = {num_tokens}; the losses are {described(losses.losses)}.")
    for name, values in losses.diagnostics.items():
        if values.shape != (num_tokens,):
            raise ConformanceError(
                f"{POLICY_LOSS_RESULT}, T = {num_tokens}; diagnostic {name!r} is {described(values)}."
            )
