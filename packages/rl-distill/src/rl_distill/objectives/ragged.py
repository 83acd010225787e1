"""Reductions over the rows of packed tensors, and broadcasts from rows to tokens, without loops over rows."""

import torch
from torch import Tensor

from rl_core.record_fields import converts_arguments


def padded_offsets(padded: Tensor) -> Tensor:
    """Return [B + 1] int64 offsets of the rows of a flattened [B, T] tensor, including padding."""
    rows, width = padded.shape
    return torch.arange(rows + 1, device=padded.device) * width


def row_index(offsets: Tensor, *, num_tokens: int) -> Tensor:
    """Return [T] int64 row index of each token, for rows [offsets[i]:offsets[i + 1]]."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=num_tokens)


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] sums of packed values [T] over each row."""
    sums = torch.zeros(len(offsets) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, row_index(offsets, num_tokens=len(values)), values)


def row_means(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] means of packed values [T] over each row's tokens in the mask [T]; 0 in rows without any."""
    sums = row_sums(torch.where(mask, values, torch.zeros_like(values)), offsets)
    return sums / row_counts(mask, offsets).clamp(min=1)


def row_maxima(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] maxima of packed values [T] over each row's tokens in the mask [T]; 0 in rows without any."""
    lowest = torch.where(mask, values, torch.full_like(values, -torch.inf))
    start = torch.full((len(offsets) - 1,), -torch.inf, dtype=values.dtype, device=values.device)
    largest = start.scatter_reduce(0, row_index(offsets, num_tokens=len(values)), lowest, "amax")
    return torch.where(row_counts(mask, offsets) > 0, largest, torch.zeros_like(largest))


def row_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] int64 counts of each row's True tokens in a packed mask [T]."""
    return row_sums(mask.to(torch.int64), offsets)


@converts_arguments
def spread_rows(row_values: Tensor, offsets: Tensor, *, num_tokens: int) -> Tensor:
    """Return [T] values of the tokens' rows, given one value per row [N]."""
    return row_values[row_index(offsets, num_tokens=num_tokens)]


def discounted_sums(values: Tensor, offsets: Tensor, *, discount: float) -> Tensor:
    """Return discounted sums from each token to the end of its row.

    Args:
        values: [T] float.
        offsets: [N + 1] int64 row offsets.
        discount: Discount per token, in [0, 1].

    Returns:
        [T] with sums[t] = values[t] + discount * sums[t + 1] within each row. The number of steps is the binary
        logarithm of the longest row; a running product of discounts would lose all precision in long rows.
    """
    rows = row_index(offsets, num_tokens=len(values))
    longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
    sums, reach, factor = values, 1, discount
    while reach < longest:
        follows = torch.where(rows[:-reach] == rows[reach:], sums[reach:], torch.zeros_like(sums[reach:]))
        sums = torch.cat([sums[:-reach] + factor * follows, sums[-reach:]])
        reach, factor = 2 * reach, factor * factor
    return sums


def next_values(values: Tensor, offsets: Tensor) -> Tensor:
    """Return [T] value of the row's next token; 0 at its last token."""
    following = torch.zeros_like(values)
    rows = row_index(offsets, num_tokens=len(values))
    following[:-1] = torch.where(rows[:-1] == rows[1:], values[1:], torch.zeros_like(values[1:]))
    return following
