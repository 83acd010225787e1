"""What an objective returns and leaves behind: results of the right kind, inputs as they were."""

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
    """An objective broke a rule that training relies on; the message names the rule and the difference."""


def check_objective_result(found: object) -> None:
    """Refuse what is no (loss, metric sums).

    Raises:
        ConformanceError: Says what was expected and what was found.
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
    """Refuse what is no `TokenLosses` of num_tokens tokens.

    Raises:
        ConformanceError: Says what was expected and what was found.
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
    """A value for a message: a tensor by shape and dtype, a tuple by its parts, anything else by its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(described(part) for part in value)})"
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:200]


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors by name, for `check_untouched`."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def check_untouched(copies: Mapping[str, Tensor], after: Mapping[str, Tensor], *, who: str) -> None:
    """Refuse inputs that are not what they were; others read them too.

    Args:
        copies: Of the inputs before the call.
        after: The inputs after it.
        who: What was called, for the message.

    Raises:
        ConformanceError: Names the first input that was changed, added or taken away.
    """
    for name in sorted(copies.keys() | after.keys()):
        if name not in copies or name not in after:
            what = "added" if name in after else "took away"
            raise ConformanceError(f"{who} must leave its inputs as they are; it {what} {name}.")
        if not _is_same(copies[name], after[name]):
            raise ConformanceError(
                f"{who} must leave its inputs as they are; it changed {name} in place. Work on a copy: "
                f"`{name.split()[-1]}.clone()`, or operations whose name does not end in _."
            )


def _is_same(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return torch.allclose(before, after.detach(), rtol=0.0, atol=0.0, equal_nan=True)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
