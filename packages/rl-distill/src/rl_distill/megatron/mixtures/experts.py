"""The experts of a mixture on one rank, in two stacked weights and a single node of autograd.

Two ways compute the same. In turn, an expert's rows stay in a CPU's cache from its first product to its last, and the
product that makes a weight's gradient adds it to megatron's buffer; the host must know how many rows each expert has.
Grouped, one product has the rows of all experts, and the host knows nothing: a GPU is never waited for.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter

from rl_core.errors import ShapeError
from rl_distill.megatron.layers.swiglu import fused_swiglu, fused_swiglu_grad, swiglu, swiglu_grad

_ALIGNMENT_BYTES = 16
"""Of the rows of every matrix in a grouped product, on any device."""


class Experts(MegatronModule):  # type: ignore[misc]
    """A rank's part of the experts of a layer.

    Attributes:
        linear_fc1: [experts, 2 * ffn, hidden], gates first; of the expert-tensor rank's slice of ffn.
        linear_fc2: [experts, hidden, ffn].
    """

    def __init__(self, num_experts: int, config: Any, *, pg_collection: Any) -> None:
        """Make the weights, with the attributes of those in megatron's own experts.

        Args:
            num_experts: On this rank.
            config: A `PolicyTransformerConfig`.
            pg_collection: megatron's process groups.

        Raises:
            ShapeError: Grouped products cannot have rows of these sizes.
        """
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self._is_grouped = config.kernels.experts == "grouped"
        if self._is_grouped:
            _check_alignment({"hidden_size": hidden, "moe_intermediate_size / expert_tensor": ffn}, config.params_dtype)
        self.linear_fc1 = _parameter((num_experts, 2 * ffn, hidden), config, axis=1, parts=2)
        self.linear_fc2 = _parameter((num_experts, hidden, ffn), config, axis=2, parts=1)
        if config.perform_initialization:
            config.init_method(self.linear_fc1)
            config.output_layer_init_method(self.linear_fc2)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, shares: Tensor) -> tuple[Tensor, None]:
        """Outputs of tokens, each times its share.

        Args:
            tokens: [N, hidden], those of the first expert first.
            tokens_per_expert: [experts of this rank], which add up to N; 0 for an expert that nothing chose.
            shares: [N] how much of each output counts.

        Returns:
            [N, hidden], and None, as megatron expects a bias.
        """
        weights = self.linear_fc1, self.linear_fc2
        if self._is_grouped:
            ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
            is_fused = self.config.kernels.is_fused
            return _Grouped.apply(tokens, shares, ends, *weights, is_fused), None  # type: ignore[no-untyped-call]
        return _InTurn.apply(tokens, shares, tokens_per_expert.tolist(), *weights), None  # type: ignore[no-untyped-call]


def _parameter(shape: tuple[int, int, int], config: Any, *, axis: int, parts: int) -> Parameter:
    """An empty weight with megatron's marks, by which its norm and reductions go.

    Args:
        shape: On this rank.
        config: megatron's.
        axis: Which expert-tensor ranks cut.
        parts: Matrices that lie one after the other along the axis.
    """
    parameter: Any = Parameter(torch.empty(shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=parts)
    parameter.allreduce = config.expert_model_parallel_size == 1
    return parameter  # type: ignore[no-any-return]


def _check_alignment(sizes: dict[str, int], dtype: torch.dtype) -> None:
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    for name, size in sizes.items():
        if size % multiple:
            raise ShapeError(
                f"{name} must be a multiple of {multiple} for products of all experts in {dtype}; found {size}. "
                'Set learner.kernels = "plain", or cut experts less.'
            )


class _InTurn(torch.autograd.Function):
    """Of each expert: its first product, the gate times the share, its second product."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shares: Tensor, counts: list[int], first: Tensor, second: Tensor) -> Tensor:
        out = torch.empty_like(tokens)
        hidden = []
        parts = (torch.split(rows, counts) for rows in (tokens, shares.unsqueeze(-1), out))
        for x, share, y, one, two in zip(*parts, first, second, strict=True):
            hidden.append(torch.mm(x, one.t()))
            torch.mm(swiglu(hidden[-1]).mul_(share), two.t(), out=y)
        ctx.counts = counts
        ctx.save_for_backward(tokens, shares, first, second, *hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, shares, first, second, *hidden = ctx.saved_tensors
        out, out_shares = torch.empty_like(tokens), torch.empty_like(shares)
        totals = [_total(weight) for weight in (first, second)]
        split = (tokens, shares.unsqueeze(-1), grads[0], out, out_shares)
        parts = (torch.split(rows, ctx.counts) for rows in split)
        for index, (x, share, grad, of_x, of_share, h) in enumerate(zip(*parts, hidden, strict=True)):
            gated, of_gated = swiglu(h), torch.mm(grad, second[index])
            of_share.copy_((of_gated.to(shares.dtype) * gated).sum(-1))
            _add_product(totals[1], index, grad, gated.mul_(share))
            of_hidden = swiglu_grad(h, of_gated.mul_(share))
            _add_product(totals[0], index, of_hidden, x)
            torch.mm(of_hidden, first[index], out=of_x)
        return out, out_shares, None, _own(first, totals[0]), _own(second, totals[1])


class _Grouped(torch.autograd.Function):
    """The same with one product for the rows of all experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shares: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        first, second, ctx.is_fused = rest
        hidden = _product(tokens, first.mT, ends)
        ctx.save_for_backward(tokens, shares, ends, first, second, hidden)
        gated = (fused_swiglu if ctx.is_fused else swiglu)(hidden)
        return _product(gated.mul_(shares.unsqueeze(-1)), second.mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, shares, ends, first, second, hidden = ctx.saved_tensors
        grad, share = grads[0].contiguous(), shares.unsqueeze(-1)  # the product takes no expanded gradient
        activation, activation_grad = (fused_swiglu, fused_swiglu_grad) if ctx.is_fused else (swiglu, swiglu_grad)
        gated, of_gated = activation(hidden), _product(grad, second, ends)
        out_shares = (of_gated.to(shares.dtype) * gated).sum(-1)
        of_second = _weight_grad(second, grad, gated.mul_(share), ends)
        of_hidden = activation_grad(hidden, of_gated.mul_(share))
        of_first = _weight_grad(first, of_hidden, tokens, ends)
        return _product(of_hidden, first, ends), out_shares, None, of_first, of_second, None


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[N, out] of rows [N, in], those up to each end times the next of the weights [experts, in, out]."""
    if not len(rows):  # a kernel may refuse to do nothing
        return rows.new_empty(0, weights.shape[-1])
    # float32 on a GPU works too, by a loop of torch's own for which the host waits; so do GPUs before Hopper.
    return F.grouped_mm(rows, weights, offs=ends)


def _weight_grad(weight: Tensor, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor | None:
    """Of `_product(x, weight.mT, ends)`; None where the weight is frozen, or megatron's buffer has the gradient."""
    total = _total(weight)
    if total is None or not len(x):
        return _own(weight, total)
    found = F.grouped_mm(grad.t(), x, offs=ends)
    if grad.is_cuda and _leaves_empty_groups(grad.device):
        is_empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        found.masked_fill_(is_empty[:, None, None], 0.0)
    total.add_(found)
    return _own(weight, total)


@lru_cache
def _leaves_empty_groups(device: torch.device) -> bool:
    """True where a product over no rows gives what was in memory, not zeros: Blackwell (pytorch issue 172439)."""
    return torch.cuda.get_device_capability(device) >= (10, 0)


def _total(weight: Tensor) -> Tensor | None:
    """Where a weight's gradient is added: megatron's buffer, else zeros; None for a frozen weight."""
    if not weight.requires_grad:
        return None
    total: Tensor | None = getattr(weight, "main_grad", None)
    return torch.zeros_like(weight) if total is None else total


def _own(weight: Tensor, total: Tensor | None) -> Tensor | None:
    """The gradient for autograd; a placeholder if it is in Megatron's buffer."""
    return total if total is None or not hasattr(weight, "main_grad") else gradient_elsewhere(weight)


def gradient_elsewhere(weight: Tensor) -> Tensor:
    """What a backward pass gives for a weight whose gradient it has added to megatron's `main_grad`.

    megatron's data parallelism, which may sum the buffer while others are made, hears of a gradient only where autograd
    gets one, and then leaves it out. The weight itself has the right shape, and takes no memory.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.detach()


def _add_product(total: Tensor | None, index: int, grad: Tensor, x: Tensor) -> None:
    """Add grad.t() @ x to an expert's part of a gradient."""
    if total is None:
        return
    if total.dtype == grad.dtype:
        total[index].addmm_(grad.t(), x)
    else:
        total[index].add_(torch.mm(grad.t(), x))
