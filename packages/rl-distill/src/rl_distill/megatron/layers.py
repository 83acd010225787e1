"""Parts of a layer: the gated activation, the norm, its recomputation, and functions that torch's compiler compiles."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import structlog
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@lru_cache(maxsize=64)
def compiled(function: Callable[P, R], device_type: str, *, otherwise: Callable[P, R] | None = None) -> Callable[P, R]:
    """Return the function, compiled at its first call for tensors of any size on a device type.

    Args:
        function: Function that returns new tensors, or fills one of its arguments.
        device_type: Device type, such as "cuda".
        otherwise: Equivalent function for when compilation fails; None for the function itself.
    """
    plain = function if otherwise is None else otherwise
    return _compiled_or_plain(function, plain) if can_compile(device_type) else plain


@lru_cache(maxsize=8)
def can_compile(device_type: str) -> bool:
    """Return whether torch's compiler works, tested once per process with a tiny tensor.

    It needs a writable folder, Triton on a GPU, and a C++ compiler on a CPU.
    """
    try:
        with _disable_current_modes():  # compiled code would read the memory of fake tensors, which have none
            _compile(_tried)(torch.ones(2, 3, device=device_type))
    except Exception as error:  # a broken compiler may raise anything; a step must not fail because of it
        _tell(error, device=device_type)
        return False
    return True


def _compiled_or_plain(function: Callable[P, R], plain: Callable[P, R]) -> Callable[P, R]:
    """Compile a function, but run the plain one once the compiler fails, or for inputs beyond its recompile limit."""
    attempt, dynamo = _compile(function), torch._dynamo.exc
    is_refused = is_told = False

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_refused, is_told
        if not is_refused and not any(isinstance(one, FakeTensor) for one in args):
            try:
                return attempt(*args, **kwargs)
            except (dynamo.TorchDynamoException, dynamo.FailOnRecompileLimitHit) as error:  # before any computation
                is_refused = isinstance(error, dynamo.TorchDynamoException)
                if not is_told:
                    _tell(error, function=getattr(plain, "__name__", ""))
                is_told = True
        return plain(*args, **kwargs)

    return run


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compile in this process. A pool of compiler processes per rank would take longer to start than it saves.

    `fullgraph=True` makes torch report a function that exceeds the recompile limit.
    """
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


def _tell(error: Exception, **of: str) -> None:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    _log.warning("not_compiled", **of, reason=reason)


def _tried(x: Tensor) -> Tensor:
    return x * 2.0 + 1.0


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


def forget_between(norm: torch.nn.Module, reader: torch.nn.Module) -> None:
    """Free a norm's output once its only reader has used it, and recompute it in the reader's backward pass.

    Args:
        norm: Norm whose output is recomputed from its input.
        reader: Module that returns a tuple. Its first operation saves the norm's output for the backward pass.
    """
    compute = norm.forward
    made: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return compute(x)  # type: ignore[no-any-return]
        made.append(CheckpointWithoutOutput(fp8=None))  # Megatron's default needs Transformer Engine
        return made[-1].checkpoint(compute, x)  # type: ignore[no-any-return]

    def forget(_reader: Any, _inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        if made:
            made.pop().discard_output_and_register_recompute(outputs[0])

    norm.forward = forward
    reader.register_forward_hook(forget)
