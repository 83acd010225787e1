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
        return swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return swiglu_grad(x, grads[0])


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 * ffn]; gate first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `swiglu` to its input, from that to its output."""
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=grad_up)
    grad_up.mul_(grad)
    torch.mul(grad, up, out=grad_gate)
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
