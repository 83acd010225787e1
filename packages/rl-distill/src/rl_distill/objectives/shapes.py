"""Entry checks of the objectives: shapes and dtypes, said as expected, found, what to do."""

from collections.abc import Mapping

import torch

from rl_core.errors import DataError, ShapeError

AGREEMENT = 1e-2
"""How far a logprob may be above 0, and two of one token apart, by rounding."""


def check_tokens(tensors: Mapping[str, torch.Tensor]) -> int:
    """Refuse token tensors that are not 1-D and equally long.

    Args:
        tensors: Name and [T] tensor each; the first sets T.

    Returns:
        T.

    Raises:
        ShapeError: One of them is not [T].
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
    """Refuse padded tensors that are not 2-D and equally large; the first sets the size.

    Raises:
        ShapeError: One of them is not [B, T].
    """
    _check_alike(tensors, "[B, T]", "Give rows that are padded to one length.")


def refuse_probabilities(logprobs: torch.Tensor, mask: torch.Tensor, name: str) -> None:
    """Refuse what no logprobs can be; a GPU is not stopped to look.

    Args:
        logprobs: [B, T].
        mask: [B, T] bool, tokens that count.
        name: Of the logprobs.

    Raises:
        DataError: One is above 0.
    """
    if logprobs.device.type == "cpu" and bool((logprobs.detach().gt(AGREEMENT) & (mask != 0)).any()):
        found = float(logprobs.detach()[mask != 0].max())
        raise DataError(f"{name} must be at most 0; found {found:.4g}. Give `log_softmax` of the logits.")


def check_rows(tensors: Mapping[str, torch.Tensor]) -> int:
    """Refuse row tensors that are not 1-D and equally long; gives their length N.

    Raises:
        ShapeError: One of them is not [N].
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
    """Refuse a mask that is not bool.

    Raises:
        ShapeError: Another dtype; a float mask would weigh tokens silently.
    """
    if loss_mask.dtype != torch.bool:
        raise ShapeError(f"loss_mask must have dtype torch.bool; found {loss_mask.dtype}. Convert with `mask > 0`.")


def as_mask(padded: torch.Tensor) -> torch.Tensor:
    """A mask of integers, as many libraries have it, as bool; one of floats stays, and `check_mask` refuses it."""
    return padded if padded.is_floating_point() else padded != 0


def check_offsets(offsets: torch.Tensor, *, num_tokens: int) -> None:
    """Refuse offsets that do not run from 0 to `num_tokens`.

    On a GPU only the shape and dtype are checked, since reading values would stop the device.

    Raises:
        ShapeError: Not [N + 1] int64, or other ends.
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
