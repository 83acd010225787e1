"""The gated activation in one autograd node."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, keeping its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grads[0])
        torch.mul(grads[0], up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return out


class SwiGLU(torch.nn.Module):
    """The gated activation, [..., 2 * ffn] to [..., ffn]; gate first."""

    def __init__(self, config: Any) -> None:  # noqa: ARG002 - megatron's signature
        """Take what megatron gives an activation."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Gate and multiply."""
        return _SwiGLUFunction.apply(x)  # type: ignore[no-any-return, no-untyped-call]
