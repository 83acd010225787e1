"""The experts of a mixture on one rank, one after the other in a single node of autograd.

On a CPU `F.grouped_mm` is the same loop over MKL's products, with the weights in one stack. Here each expert keeps its
own parameters, products are those of the run (`rl_distill.products`), the rows of an expert stay in the cache from its
first product to its last, and gradients of weights are added to megatron's buffer by the product that makes them.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from rl_distill.megatron.swiglu import swiglu, swiglu_grad


class Experts(SequentialMLP):  # type: ignore[misc]
    """megatron's experts in turn, with its parameters and their names."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, shares: Tensor) -> tuple[Tensor, None]:
        """Outputs of tokens, each times its share.

        Args:
            tokens: [N, hidden], those of the first expert first.
            tokens_per_expert: [experts of this rank], which add up to N; 0 for an expert that nothing chose.
            shares: [N] how much of each output counts.

        Returns:
            [N, hidden], and None, as megatron expects a bias.
        """
        first = [expert.linear_fc1.weight for expert in self.local_experts]
        second = [expert.linear_fc2.weight for expert in self.local_experts]
        counts = tokens_per_expert.tolist()
        return _ExpertsFunction.apply(tokens, shares, counts, *first, *second), None  # type: ignore[no-untyped-call]


class _ExpertsFunction(torch.autograd.Function):
    """Of each expert: its first product, the gate times the share, its second product."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shares: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        out = tokens.new_empty(len(tokens), weights[-1].shape[0])
        hidden = []
        parts = (torch.split(rows, counts) for rows in (tokens, shares.unsqueeze(-1), out))
        for x, share, y, first, second in zip(*parts, *_halves(weights), strict=True):
            hidden.append(torch.mm(x, first.t()))
            torch.mm(swiglu(hidden[-1]).mul_(share), second.t(), out=y)
        ctx.counts = counts
        ctx.save_for_backward(tokens, shares, *hidden, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, shares, *saved = ctx.saved_tensors
        counts = ctx.counts
        hidden, weights = saved[: len(counts)], saved[len(counts) :]
        out, out_shares = torch.empty_like(tokens), torch.empty_like(shares)
        split = (tokens, shares.unsqueeze(-1), grads[0], out, out_shares)
        parts = (torch.split(rows, counts) for rows in split)
        of_weights = []
        for x, share, grad, of_x, of_share, h, first, second in zip(*parts, hidden, *_halves(weights), strict=True):
            gated, of_gated = swiglu(h), torch.mm(grad, second)
            of_share.copy_((of_gated.to(shares.dtype) * gated).sum(-1))
            of_second = _weight_grad(second, grad, gated.mul_(share))
            of_hidden = swiglu_grad(h, of_gated.mul_(share))
            of_weights.append((_weight_grad(first, of_hidden, x), of_second))
            torch.mm(of_hidden, first, out=of_x)
        return out, out_shares, None, *(of[0] for of in of_weights), *(of[1] for of in of_weights)


def _halves(weights: Any) -> tuple[Any, Any]:
    return weights[: len(weights) // 2], weights[len(weights) // 2 :]


def _weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Of x @ weight.t(); None where the weight is frozen. Where megatron's buffer takes it, something in its place.

    megatron's data parallelism, which may sum the buffer while others are made, hears of a gradient only where autograd
    gets one, and then leaves it out. The weight itself has the right shape, and takes no memory.
    """
    if not weight.requires_grad:
        return None
    total = getattr(weight, "main_grad", None)
    if total is None:
        return torch.mm(grad.t(), x)
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
    else:
        total.add_(torch.mm(grad.t(), x))
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.detach()
