"""Checks of an objective's results and of its inputs after the call."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_core.errors import RLError
from rl_distill.objectives.policy_loss import TokenLosses

OBJECTIVE_RESULT = (
    "an objective must return (loss, metric sums): a scalar float tensor, and a mapping from a metric's name to "
    "(weighted sum, weight), both scalar tensors"
)
POLICY_LOSS_RESULT = (
    "a policy loss must return TokenLosses(losses=..., diagnostics={...}) with float losses [T] and tensors [T] by "
    "metric name"
)


class ConformanceError(RLError, AssertionError):
    """An objective breaks a rule that training relies on; the message states the rule and the difference."""


def check_objective_result(found: object) -> None:
    """Check that a result is (loss, metric sums).

    Raises:
        ConformanceError: It is not; the message states what was expected and found.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConformanceError(f"{OBJECTIVE_RESULT}; found {described(found)}.")
    loss, metrics = found
    if not _is_float(loss):
        raise ConformanceError(f"{OBJECTIVE_RESULT}; the loss is {described(loss)}.")
    if loss.ndim != 0:
        raise ConformanceError(f"the loss must be a scalar; found shape {list(loss.shape)}. Sum it over the tokens.")
    if not isinstance(metrics, Mapping):
        raise ConformanceError(f"{OBJECTIVE_RESULT}; the metric sums are {described(metrics)}.")
    for name, pair in metrics.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(value, Tensor) and value.ndim == 0 for value in pair):
            raise ConformanceError(f"{OBJECTIVE_RESULT}; metric {name!r} is {described(pair)}.")


def check_token_losses(found: object, *, num_tokens: int) -> None:
    """Check that a result is `TokenLosses` of num_tokens tokens.

    Raises:
        ConformanceError: It is not; the message states what was expected and found.
    """
    if not isinstance(found, TokenLosses):
        raise ConformanceError(f"{POLICY_LOSS_RESULT}; found {described(found)}.")
    if not _is_float(found.losses) or found.losses.shape != (num_tokens,):
        raise ConformanceError(f"{POLICY_LOSS_RESULT}, T = {num_tokens}; the losses are {described(found.losses)}.")
    if not isinstance(found.diagnostics, Mapping):
        raise ConformanceError(f"{POLICY_LOSS_RESULT}; the diagnostics are {described(found.diagnostics)}.")
    for name, values in found.diagnostics.items():
        if not isinstance(values, Tensor) or values.shape != (num_tokens,):
            raise ConformanceError(
                f"{POLICY_LOSS_RESULT}, T = {num_tokens}; diagnostic {name!r} is {described(values)}."
            )


def described(value: object) -> str:
    """Describe a value for a message: a tensor by shape and dtype, a tuple by its parts, others by type and value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(described(part) for part in value)})"
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:200]


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors by name, for `check_untouched`."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def check_untouched(copies: Mapping[str, Tensor], after: Mapping[str, Tensor], *, who: str) -> None:
    """Check that a call did not change its inputs, which other code reads too.

    Args:
        copies: Copies of the inputs before the call.
        after: Inputs after the call.
        who: The callee, for the message.

    Raises:
        ConformanceError: An input was changed, added or removed; the message names the first one.
    """
    for name in sorted(copies.keys() | after.keys()):
        if name not in copies or name not in after:
            what = "added" if name in after else "removed"
            raise ConformanceError(f"{who} must not change its inputs; it {what} {name}.")
        if not _is_same(copies[name], after[name]):
            raise ConformanceError(
                f"{who} must not change its inputs; it changed {name} in place. Use a copy, "
                f"`{name.split()[-1]}.clone()`, or operations without a trailing underscore in their name."
            )


def _is_same(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return torch.allclose(before, after.detach(), rtol=0.0, atol=0.0, equal_nan=True)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
