"""Aggregations of token losses, expressed as token weights over the global batch.

The loss is the sum over t of weight[t] * loss[t]. Weights are computed once over the global batch, before it is split
into ranks and micro-batches, so the split changes neither loss nor gradient.

Source: token-mean is DAPO's (Yu et al. 2025, arXiv:2503.14476, section 3.3), seq-mean-token-mean GRPO's
(Shao et al. 2024, arXiv:2402.03300), seq-mean-token-sum-norm Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveInt, converts_arguments
from rl_core.registry import Registry
from rl_distill.objectives.ragged import padded_offsets, row_counts, spread_rows
from rl_distill.objectives.shapes import as_mask, check_mask, check_offsets, check_padded, check_tokens

Horizon = PositiveInt | None
"""Constant length by which some aggregations divide."""

RowWeights = Callable[[Tensor, int | None], Tensor]
"""([N] float64 trained tokens of each row, horizon) -> [N] weight of each trained token of that row.

A row without trained tokens may get any finite value; it is ignored.
"""


def token_mean(token_counts: Tensor, _horizon: int | None) -> Tensor:
    """Mean over all trained tokens of the global batch."""
    return torch.ones_like(token_counts) / token_counts.sum().clamp(min=1)


def token_sum(token_counts: Tensor, _horizon: int | None) -> Tensor:
    """Sum over all trained tokens of the global batch."""
    return torch.ones_like(token_counts)


def seq_mean_token_sum(token_counts: Tensor, _horizon: int | None) -> Tensor:
    """Sum over each trajectory, mean over trajectories."""
    return torch.ones_like(token_counts) / (token_counts > 0).sum().clamp(min=1)


def seq_mean_token_sum_norm(token_counts: Tensor, horizon: int | None) -> Tensor:
    """Sum over each trajectory divided by a constant length, mean over trajectories.

    Raises:
        SettingsError: horizon is None.
    """
    if horizon is None:
        raise SettingsError(
            f"aggregation seq-mean-token-sum-norm needs horizon >= 1; found {horizon}. Set it to the maximum response "
            "length, a constant over all batches."
        )
    return seq_mean_token_sum(token_counts, None) / horizon


def seq_mean_token_mean(token_counts: Tensor, horizon: int | None) -> Tensor:
    """Mean over each trajectory, mean over trajectories."""
    return seq_mean_token_sum(token_counts, horizon) / token_counts.clamp(min=1)


AGGREGATIONS: Registry[RowWeights] = Registry(
    "aggregation",
    {
        "token-mean": token_mean,
        "token-sum": token_sum,
        "seq-mean-token-sum": seq_mean_token_sum,
        "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
        "seq-mean-token-mean": seq_mean_token_mean,
    },
    group="rl_distill.aggregations",
)


@converts_arguments
def token_weights(loss_mask: Tensor, offsets: Tensor, *, row_weights: RowWeights, horizon: Horizon = None) -> Tensor:
    """Return the weight of each token in the loss of the global batch.

    Args:
        loss_mask: [T] bool mask of the global batch, True at trained tokens.
        offsets: [N + 1] int64 row offsets of the mask.
        row_weights: An aggregation from `AGGREGATIONS`, or a function of your own.
        horizon: Constant length by which seq-mean-token-sum-norm divides.

    Returns:
        [T] float32 weights, 0 where masked. Trajectories without a trained token are ignored. The weights sum to 1 for
        token-mean and seq-mean-token-mean, and to the number of trained tokens for token-sum. For seq-mean-token-sum
        they sum to the mean number of trained tokens, which seq-mean-token-sum-norm divides by `horizon`.

    Raises:
        ShapeError: loss_mask is not [T] bool, or the offsets do not match it.
        SettingsError: The aggregation needs a horizon, or the horizon is below 1.
    """
    num_tokens = check_tokens({"loss_mask": loss_mask})
    check_mask(loss_mask)
    check_offsets(offsets, num_tokens=num_tokens)
    of_rows = row_weights(row_counts(loss_mask, offsets).double(), horizon).float()
    return torch.where(loss_mask, spread_rows(of_rows, offsets, num_tokens=num_tokens), 0.0)


@converts_arguments
def aggregate(
    values: Tensor,
    loss_mask: Tensor,
    *,
    aggregation: str = "token-mean",
    horizon: Horizon = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Reduce token values, such as losses or a KL, to a scalar.

    Args:
        values: Padded [B, T], or packed [T] with `offsets`. Masked values are ignored, even NaN.
        loss_mask: Mask of the same shape: bool, or, if padded, integers that are nonzero at trained tokens.
        aggregation: Name in `AGGREGATIONS`.
        horizon: Constant length by which seq-mean-token-sum-norm divides.
        offsets: [N + 1] int64 row offsets of packed values.

    Raises:
        ShapeError: The shapes do not match, or the mask is not bool.
        SettingsError: The aggregation is unknown or needs a horizon.
    """
    if offsets is None:
        check_padded({"loss_mask": loss_mask, "values": values})
        offsets = padded_offsets(loss_mask)
        values, loss_mask = values.reshape(-1), as_mask(loss_mask).reshape(-1)
    check_tokens({"loss_mask": loss_mask, "values": values})
    weights = token_weights(loss_mask, offsets, row_weights=AGGREGATIONS.get(aggregation), horizon=horizon)
    return (weights * torch.where(loss_mask, values, 0.0)).sum()
