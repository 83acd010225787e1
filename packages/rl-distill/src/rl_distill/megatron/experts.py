"""The experts of a mixture on one rank, as two stacked weights and a single autograd node.

Two implementations compute the same result. In turns, an expert's rows stay in a CPU's cache from its first product to
its last, and the weight-gradient product accumulates into Megatron's buffer; the host must know the number of rows of
each expert. Grouped, one product covers the rows of all experts, and the host never waits for the GPU.
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
from rl_distill.megatron.layers import fused_swiglu, fused_swiglu_grad, swiglu, swiglu_grad

_ALIGNMENT_BYTES = 16
"""Required alignment of matrix rows in a grouped product, on any device."""


class Experts(MegatronModule):  # type: ignore[misc]
    """A rank's part of a layer's experts.

    Attributes:
        linear_fc1: [experts, 2 * ffn, hidden], gates first, for the expert-tensor rank's slice of ffn.
        linear_fc2: [experts, hidden, ffn] for the same slice.
    """

    def __init__(self, num_experts: int, config: Any, *, pg_collection: Any) -> None:
        """Create the weights with the attributes of those in Megatron's experts.

        Args:
            num_experts: Number of experts on this rank.
            config: A `PolicyTransformerConfig`.
            pg_collection: Megatron's process groups.

        Raises:
            ShapeError: Grouped products do not support rows of these sizes.
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
        """Compute the outputs of tokens, each multiplied by its share.

        Args:
            tokens: [N, hidden], sorted by expert.
            tokens_per_expert: [experts of this rank] number of rows of each expert, which sum to N.
            shares: [N] weight of each output.

        Returns:
            [N, hidden], and None in place of the bias that Megatron expects.
        """
        weights = self.linear_fc1, self.linear_fc2
        if self._is_grouped:
            ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
            is_fused = self.config.kernels.is_fused
            return _Grouped.apply(tokens, shares, ends, *weights, is_fused), None  # type: ignore[no-untyped-call]
        return _InTurn.apply(tokens, shares, tokens_per_expert.tolist(), *weights), None  # type: ignore[no-untyped-call]


def _parameter(shape: tuple[int, int, int], config: Any, *, axis: int, parts: int) -> Parameter:
    """Create an uninitialized weight with the attributes by which Megatron computes norms and reductions.

    Args:
        shape: Shape on this rank.
        config: Megatron's configuration.
        axis: Axis that expert-tensor ranks split.
        parts: Number of matrices concatenated along the axis.
    """
    parameter: Any = Parameter(torch.empty(shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=parts)
    # True only if the data-parallel ranks are the ranks with the same experts.
    is_split_alike = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    parameter.allreduce = config.expert_model_parallel_size == 1 and is_split_alike
    return parameter  # type: ignore[no-any-return]


def _check_alignment(sizes: dict[str, int], dtype: torch.dtype) -> None:
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    for name, size in sizes.items():
        if size % multiple:
            raise ShapeError(
                f"{name} must be a multiple of {multiple} for grouped expert products in {dtype}; found {size}. "
                'Set optimizer.kernels = "plain", or a smaller expert_tensor.'
            )


class _InTurn(torch.autograd.Function):
    """Experts in turn: for each, its first product, the gate times the share, and its second product."""

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
    """All experts in one product per matrix."""

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
        grad, share = grads[0].contiguous(), shares.unsqueeze(-1)  # the product does not support expanded tensors
        activation, activation_grad = (fused_swiglu, fused_swiglu_grad) if ctx.is_fused else (swiglu, swiglu_grad)
        gated, of_gated = activation(hidden), _product(grad, second, ends)
        out_shares = (of_gated.to(shares.dtype) * gated).sum(-1)
        of_second = _weight_grad(second, grad, gated.mul_(share), ends)
        of_hidden = activation_grad(hidden, of_gated.mul_(share))
        of_first = _weight_grad(first, of_hidden, tokens, ends)
        return _product(of_hidden, first, ends), out_shares, None, of_first, of_second, None


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [N, in] by weights [experts, in, out]; expert i has the rows up to ends[i]."""
    if not len(rows):  # kernels may not support 0 rows
        return rows.new_empty(0, weights.shape[-1])
    # For float32 on a GPU, and on GPUs before Hopper, torch loops over experts, and the host waits.
    return F.grouped_mm(rows, weights, offs=ends)


def _weight_grad(weight: Tensor, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor | None:
    """Return the gradient of `_product(x, weight.mT, ends)` for the weight; see `_own`."""
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
    """Return whether a product over no rows returns uninitialized memory, as on Blackwell (pytorch issue 172439)."""
    return torch.cuda.get_device_capability(device) >= (10, 0)


def _total(weight: Tensor) -> Tensor | None:
    """Return the tensor that accumulates a weight's gradient: Megatron's buffer or zeros; None for a frozen weight."""
    if not weight.requires_grad:
        return None
    total: Tensor | None = getattr(weight, "main_grad", None)
    return torch.zeros_like(weight) if total is None else total


def _own(weight: Tensor, total: Tensor | None) -> Tensor | None:
    """Return the gradient for autograd: None for a frozen weight, a placeholder if it is in Megatron's buffer."""
    return total if total is None or not hasattr(weight, "main_grad") else gradient_elsewhere(weight)


def gradient_elsewhere(weight: Tensor) -> Tensor:
    """Return a placeholder gradient for a weight whose gradient was added to Megatron's `main_grad`.

    Megatron's data parallelism learns that a gradient exists only if autograd receives one, which it then ignores. The
    weight itself has the right shape and needs no extra memory.
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
