"""Linear maps with a gradient of their own, such as exchanges between ranks and sums over them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def linear_map(x: Tensor, *operands: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
    """Apply a linear map, with another one for its gradient.

    Args:
        x: The tensor that has a gradient.
        operands: Further tensors, without gradient, such as indices; kept for the backward pass.
        forward: (x, *operands) -> a new tensor, without autograd.
        backward: (gradient of the result, *operands) -> gradient of x.
    """
    return _LinearMap.apply(x, forward, backward, *operands)  # type: ignore[no-any-return, no-untyped-call]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor], *operands: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.gradient = backward
        return forward(x.detach(), *operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        return ctx.gradient(grads[0], *operands), None, None, *(None for _ in operands)


def sum_over_ranks(values: Tensor, *, group: Any) -> Tensor:
    """Return the sum over ranks, with gradient for this rank's part; the values themselves if there is one rank."""
    if group is None or group.size() == 1:
        return values

    def total(parts: Tensor) -> Tensor:
        summed = parts.clone()
        dist.all_reduce(summed, group=group)
        return summed

    return linear_map(values, forward=total, backward=lambda grad: grad)
