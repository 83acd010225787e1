"""Checks of the objectives' inputs: shapes and dtypes."""

from collections.abc import Mapping

import torch

from rl_core.errors import DataError, ShapeError

AGREEMENT = 1e-2
"""Tolerance for rounding: of a logprob above 0, and between two logprobs of one token."""


def check_tokens(tensors: Mapping[str, torch.Tensor]) -> int:
    """Check that token tensors are 1-D and equally long.

    Args:
        tensors: Pairs of name and [T] tensor; the first determines T.

    Returns:
        T.

    Raises:
        ShapeError: A tensor is not [T].
    """
    first, reference = next(iter(tensors.items()))
    if reference.ndim != 1:
        raise ShapeError(f"{first} must have shape [T]; found {list(reference.shape)}. Pack the rows end to end.")
    for name, tensor in tensors.items():
        if tensor.shape != reference.shape:
            raise ShapeError(
                f"{name} must have shape [T] with T = {len(reference)}, as {first} has; found {list(tensor.shape)}. "
                "Pack every token tensor with the same offsets."
            )
    return len(reference)


def check_padded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that padded tensors are 2-D and of the first one's shape.

    Raises:
        ShapeError: A tensor is not [B, T].
    """
    _check_alike(tensors, "[B, T]", "Give rows that are padded to one length.")


def refuse_probabilities(logprobs: torch.Tensor, mask: torch.Tensor, name: str) -> None:
    """Check that logprobs are not above 0; skipped on a GPU, to avoid waiting for it.

    Args:
        logprobs: [B, T] logprobs to check.
        mask: [B, T] bool, tokens that count.
        name: Name of the logprobs, for the message.

    Raises:
        DataError: A logprob is above 0.
    """
    if logprobs.device.type == "cpu" and bool((logprobs.detach().gt(AGREEMENT) & (mask != 0)).any()):
        found = float(logprobs.detach()[mask != 0].max())
        raise DataError(f"{name} must be at most 0; found {found:.4g}. Give `log_softmax` of the logits.")


def check_rows(tensors: Mapping[str, torch.Tensor]) -> int:
    """Check that row tensors are 1-D and equally long, and return their length N.

    Raises:
        ShapeError: A tensor is not [N].
    """
    return _check_alike(tensors, "[N]", "Give one value for each trajectory.")


def _check_alike(tensors: Mapping[str, torch.Tensor], axes: str, advice: str) -> int:
    first, reference = next(iter(tensors.items()))
    if reference.ndim != len(axes.split(",")):
        raise ShapeError(f"{first} must have shape {axes}; found {list(reference.shape)}. {advice}")
    for name, tensor in tensors.items():
        if tensor.shape != reference.shape:
            raise ShapeError(
                f"{name} must have shape {axes}, as {first} has; found {list(tensor.shape)} beside "
                f"{list(reference.shape)}. {advice}"
            )
    return len(reference)


def check_mask(loss_mask: torch.Tensor) -> None:
    """Check that a mask is bool.

    Raises:
        ShapeError: The mask has another dtype; a float mask would silently weight tokens.
    """
    if loss_mask.dtype != torch.bool:
        raise ShapeError(f"loss_mask must have dtype torch.bool; found {loss_mask.dtype}. Convert with `mask > 0`.")


def as_mask(padded: torch.Tensor) -> torch.Tensor:
    """Convert an integer mask to bool; a float mask is unchanged, and `check_mask` rejects it."""
    return padded if padded.is_floating_point() else padded != 0


def check_offsets(offsets: torch.Tensor, *, num_tokens: int) -> None:
    """Check that offsets run from 0 to `num_tokens`.

    On a GPU, only the shape and dtype are checked, since reading values would wait for the device.

    Raises:
        ShapeError: The offsets are not [N + 1] int64, or have other ends.
    """
    if offsets.ndim != 1 or len(offsets) < 1 or offsets.dtype != torch.int64:
        raise ShapeError(f"offsets must be [N + 1] int64; found {list(offsets.shape)} {offsets.dtype}.")
    if offsets.device.type != "cpu":
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_tokens or bool((offsets.diff() < 0).any()):
        raise ShapeError(
            f"offsets must run from 0 to T = {num_tokens} and never fall; found {int(offsets[0])} to "
            f"{int(offsets[-1])}. Use the offsets of the tensor that was packed."
        )
