"""The gated activation as one autograd node."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from rl_distill.megatron.layers.compiled import compiled


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, which saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_fused: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.is_fused = is_fused
        return fused_swiglu(x) if is_fused else swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (fused_swiglu_grad if ctx.is_fused else swiglu_grad)(x, grads[0]), None


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2 * ffn], with the gate first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `swiglu`'s input from that of its output."""
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=grad_up)
    grad_up.mul_(grad)
    torch.mul(grad, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    return out


def fused_swiglu(x: Tensor) -> Tensor:
    """Compute `swiglu` in one compiled pass where possible."""
    out: Tensor = compiled(swiglu, x.device.type)(x.detach().flatten(0, -2))
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


def fused_swiglu_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Compute `swiglu_grad` in one compiled pass where possible."""
    run = compiled(_swiglu_grad, x.device.type, otherwise=swiglu_grad)
    out: Tensor = run(x.detach().flatten(0, -2), grad.flatten(0, -2))
    return out.view(x.shape)


def _swiglu_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Compute `swiglu_grad` without writing into views, which torch's compiler does not support."""
    gate, up = x.chunk(2, dim=-1)
    share = gate.sigmoid()
    return torch.cat([grad * up * share * (1.0 + gate * (1.0 - share)), grad * gate * share], dim=-1)


class SwiGLU(torch.nn.Module):
    """The gated activation, [..., 2 * ffn] to [..., ffn], with the gate first."""

    def __init__(self, config: Any) -> None:
        """Build the activation with Megatron's arguments.

        Args:
            config: A PolicyTransformerConfig.
        """
        super().__init__()
        self._is_fused = config.kernels.is_fused

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation."""
        return _SwiGLUFunction.apply(x, self._is_fused)  # type: ignore[no-any-return, no-untyped-call]
