"""Linear maps of a tensor whose gradient is computed by another linear map, such as exchanges between ranks."""

from collections.abc import Callable
from typing import Any

import torch
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
