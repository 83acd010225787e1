"""Checks of shapes and dtypes of the objectives' inputs."""

from collections.abc import Mapping

import torch

from rl_core.errors import DataError, ShapeError

AGREEMENT = 1e-2
"""Rounding tolerance: for a logprob above 0, and between two logprobs of one token."""


def check_tokens(tensors: Mapping[str, torch.Tensor]) -> int:
    """Check that token tensors are 1-D and have the same length.

    Args:
        tensors: [T] tensors by name; the first determines T.

    Returns:
        T.

    Raises:
        ShapeError: A tensor is not [T].
    """
    return _check_alike(tensors, "[T]", "Pack the rows of every token tensor end to end, with the same offsets.")


def check_padded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that padded tensors are 2-D and have the same shape.

    Raises:
        ShapeError: A tensor is not [B, T].
    """
    _check_alike(tensors, "[B, T]", "Pass rows padded to one length.")


def refuse_nested(**tensors: torch.Tensor | None) -> None:
    """Check that no tensor is nested (jagged).

    Raises:
        ShapeError: A tensor is nested.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_nested:
            raise ShapeError(
                f"{name} must be padded, [B, T]; found a nested tensor. Use `to_padded_tensor(0.0)`, or pack all "
                "columns: `values()` and `offsets()` are the fields of PolicyTokens."
            )


def refuse_probabilities(logprobs: torch.Tensor, mask: torch.Tensor, name: str) -> None:
    """Check that logprobs are not above 0; skipped on GPUs, where reading values synchronizes.

    Args:
        logprobs: [B, T] logprobs to check.
        mask: [B, T], nonzero at the tokens to check.
        name: Name of the logprobs, for the message.

    Raises:
        DataError: A logprob is above 0.
    """
    if logprobs.device.type == "cpu" and bool((logprobs.detach().gt(AGREEMENT) & (mask != 0)).any()):
        found = float(logprobs.detach()[mask != 0].max())
        raise DataError(f"{name} must be at most 0; found {found:.4g}. Pass `log_softmax` of the logits.")


def check_rows(tensors: Mapping[str, torch.Tensor]) -> int:
    """Check that row tensors are 1-D and have the same length; return this length N.

    Raises:
        ShapeError: A tensor is not [N].
    """
    return _check_alike(tensors, "[N]", "Pass one value per trajectory.")


def _check_alike(tensors: Mapping[str, torch.Tensor], axes: str, advice: str) -> int:
    first, reference = next(iter(tensors.items()))
    if reference.ndim != len(axes.split(",")):
        raise ShapeError(f"{first} must have shape {axes}; found {list(reference.shape)}. {advice}")
    for name, tensor in tensors.items():
        if tensor.shape != reference.shape:
            raise ShapeError(
                f"{name} must have shape {axes} like {first}, {list(reference.shape)}; found {list(tensor.shape)}. "
                f"{advice}"
            )
    return len(reference)


def check_mask(loss_mask: torch.Tensor) -> None:
    """Check that a mask has dtype bool.

    Raises:
        ShapeError: The mask has another dtype. A float mask would silently weight tokens.
    """
    if loss_mask.dtype != torch.bool:
        raise ShapeError(f"loss_mask must have dtype torch.bool; found {loss_mask.dtype}. Convert with `mask > 0`.")


def as_mask(padded: torch.Tensor) -> torch.Tensor:
    """Convert an integer mask to bool; a float mask is returned unchanged, for `check_mask` to reject."""
    return padded if padded.is_floating_point() else padded != 0


def check_offsets(offsets: torch.Tensor, *, num_tokens: int) -> None:
    """Check that offsets run from 0 to `num_tokens`.

    On a GPU, only shape and dtype are checked, since reading values would synchronize.

    Raises:
        ShapeError: The offsets are not [N + 1] int64, decrease, or do not run from 0 to `num_tokens`.
    """
    if offsets.ndim != 1 or len(offsets) < 1 or offsets.dtype != torch.int64:
        raise ShapeError(f"offsets must be [N + 1] int64; found {list(offsets.shape)} {offsets.dtype}.")
    if offsets.device.type != "cpu":
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_tokens or bool((offsets.diff() < 0).any()):
        raise ShapeError(
            f"offsets must run from 0 to T = {num_tokens} and never decrease; found {int(offsets[0])} to "
            f"{int(offsets[-1])}. Use the offsets of the packed tensor."
        )
