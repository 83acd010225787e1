"""Sums over the rows of packed tensors, and values spread back from rows to tokens."""

import torch
from torch import Tensor


def row_index(offsets: Tensor, *, num_tokens: int) -> Tensor:
    """[T] int64 row of each token, for rows [offsets[i]:offsets[i + 1]]."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=num_tokens)


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[N] sum of each row of packed values [T]."""
    sums = torch.zeros(len(offsets) - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, row_index(offsets, num_tokens=len(values)), values)


def row_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """[N] int64 number of True tokens of each row of a packed mask [T]."""
    return row_sums(mask.to(torch.int64), offsets)


def spread_rows(row_values: Tensor, offsets: Tensor, *, num_tokens: int) -> Tensor:
    """[T] value of each token's row, from [N]."""
    return row_values[row_index(offsets, num_tokens=num_tokens)]
