"""Importance weights that correct the mismatch between the engine's and the learner's probabilities.

Source: truncated importance sampling, Ionides 2008, doi:10.1198/106186008X320456; for an engine's mismatch,
Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; banded masking, IcePop, Ling team 2025, arXiv:2510.18855.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveFloat, converts_arguments
from rl_distill.objectives.log_ratios import bounded
from rl_distill.objectives.ragged import row_sums, spread_rows
from rl_distill.objectives.shapes import check_mask, check_offsets, check_tokens

CorrectionLevel = Literal["token", "sequence"]
"""Scope of an importance ratio: token (biased, low variance) or trajectory (unbiased, high variance)."""

WeightCap = Annotated[float, Gt(0)]
"""Maximum importance weight."""

WeightFloor = PositiveFloat
"""Minimum importance weight; smaller ones become 0."""


WeightBand = tuple[WeightFloor, WeightCap]
"""Minimum and maximum importance weight."""


@converts_arguments
def truncated_weights(
    log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, level: CorrectionLevel, cap: WeightCap = 2.0
) -> Tensor:
    """Return importance weights old / rollout, truncated from above.

    Args:
        log_ratio: [T] old_logprobs - rollout_logprobs; masked values are ignored.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.
        level: "token", or "sequence" for the product over each trajectory's trained tokens.
        cap: Maximum weight.

    Returns:
        [T] weights without gradient, 0 where masked.

    Raises:
        ShapeError: The shapes or dtypes do not match.
        SettingsError: The level is unknown, or cap is not positive.
    """
    return importance_ratios(log_ratio, loss_mask, offsets, level=level).clamp(max=cap)


@converts_arguments
def banded_weights(
    log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, level: CorrectionLevel, band: WeightBand
) -> Tensor:
    """Return importance weights old / rollout, 0 outside a band (IcePop).

    Args:
        log_ratio: [T] old_logprobs - rollout_logprobs; masked values are ignored.
        loss_mask: [T] bool.
        offsets: [N + 1] int64 row offsets.
        level: "token", or "sequence" for the product over each trajectory's trained tokens.
        band: (minimum, maximum) weight; weights outside become 0.

    Returns:
        [T] weights without gradient, 0 where masked. Loss weights stay unchanged, so tokens outside the band still
        count in means.

    Raises:
        ShapeError: The shapes or dtypes do not match.
        SettingsError: The level is unknown, or the band is not 0 < floor <= cap.
    """
    floor, cap = band
    if floor > cap:
        raise SettingsError(f"band of banded_weights must be (floor, cap) with floor <= cap; found {band}.")
    weights = importance_ratios(log_ratio, loss_mask, offsets, level=level)
    return torch.where((weights >= floor) & (weights <= cap), weights, torch.zeros_like(weights))


@converts_arguments
def importance_ratios(log_ratio: Tensor, loss_mask: Tensor, offsets: Tensor, *, level: CorrectionLevel) -> Tensor:
    """Return [T] unbounded importance ratios old / rollout; see `truncated_weights`."""
    log_ratio = blank_masked(log_ratio, loss_mask, offsets)
    if level == "sequence":
        log_ratio = spread_rows(row_sums(log_ratio, offsets), offsets, num_tokens=len(log_ratio))
    ratios = bounded(log_ratio).exp()
    return torch.where(loss_mask, ratios, torch.zeros_like(ratios))


def blank_masked(values: Tensor, loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """Check values [T], and return them without gradient, 0 where masked.

    Raises:
        ShapeError: The values are not [T], or the mask or offsets do not match.
    """
    num_tokens = check_tokens({"logprobs": values, "loss_mask": loss_mask})
    check_mask(loss_mask)
    check_offsets(offsets, num_tokens=num_tokens)
    return torch.where(loss_mask, values, torch.zeros_like(values)).detach()
