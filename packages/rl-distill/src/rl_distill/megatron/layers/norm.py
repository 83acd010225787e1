"""RMSNorm with sequence parallelism: on a CPU with fewer memory passes than torch's, on a GPU with torch's kernel."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor


class _RMSNormFunction(torch.autograd.Function):
    """y = x / rms(x) * weight, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.float()
        mean_square: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse_rms = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (values * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad, values, scale = grads[0].float(), x.float(), weight.float()
        product = grad * values
        rows = product.reshape(-1, x.shape[-1])
        # Sums over tokens and over the hidden axis are matrix-vector products, in one pass without temporaries.
        grad_weight = inverse_rms.flatten() @ rows if ctx.needs_input_grad[1] else None
        shift = (rows @ scale).view_as(inverse_rms).mul_(inverse_rms.pow(3)).div_(x.shape[-1])
        grad_x = torch.mul(grad, scale, out=product).mul_(inverse_rms).addcmul_(values, shift, value=-1.0)
        return grad_x.to(x.dtype), None if grad_weight is None else grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """Root mean square norm with the interface of Megatron's layer specifications.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        """Initialize the weight with ones.

        Args:
            config: A PolicyTransformerConfig.
            hidden_size: Size of the last axis.
            eps: Value added to the mean square.
        """
        super().__init__()
        self.eps = eps
        self._is_fused = config.kernels.is_fused
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums gradients of parameters with this mark over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis of [..., hidden_size] in float32."""
        if self._is_fused:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RMSNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]
