"""Masked whitening: subtract the mean and divide by the standard deviation."""

import torch
from torch import Tensor

from rl_core.data import are_equal_rewards
from rl_core.record_fields import NonNegativeFloat, converts_arguments
from rl_distill.objectives.shapes import check_mask, check_tokens


@converts_arguments
def masked_whiten(values: Tensor, mask: Tensor, *, eps: NonNegativeFloat = 1e-8) -> Tensor:
    """Normalize values to mean 0 and variance 1 over the tokens in the mask.

    Args:
        values: [T] float over the whole global batch; masked values are ignored.
        mask: [T] bool.
        eps: Added to the unbiased variance.

    Returns:
        [T] in the values' dtype, computed in float64, 0 where masked. Equal values or a single value become 0.

    Raises:
        ShapeError: The shapes or dtypes do not match.
        SettingsError: eps is below 0.
    """
    check_tokens({"values": values, "mask": mask})
    check_mask(mask)
    kept = values[mask].double()
    if len(kept) == 0:
        return torch.zeros_like(values)
    is_equal = are_equal_rewards(kept.min(), kept.max())
    centered = kept - kept.mean()
    variance = centered.square().sum() / max(len(kept) - 1, 1)
    whitened = torch.where(is_equal, torch.zeros_like(kept), centered * (variance + eps).rsqrt())
    return torch.zeros_like(values).masked_scatter(mask, whitened.to(values.dtype))
