"""RMSNorm in one autograd node: fewer passes over memory than torch's composite, and sequence-parallel aware."""

from typing import Any

import torch
from torch import Tensor


class _RMSNormFunction(torch.autograd.Function):
    """y = x / rms(x) * weight, in float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.float()
        inverse_rms = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (values * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grads[0].float()
        normed = x.float() * inverse_rms
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        # mean over the hidden axis of grad * weight * normed is a matrix-vector product.
        shift = (product @ weight.float()).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).sub_(normed.mul_(shift)).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """Root mean square norm, as megatron's layer specifications build it.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        """Make a weight of ones.

        Args:
            config: megatron's TransformerConfig.
            hidden_size: Size of the last axis.
            eps: Added to the mean square.
        """
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # megatron sums the gradients of marked parameters over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis of [..., hidden_size]."""
        return _RMSNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]
