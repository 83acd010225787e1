"""Context parallelism by heads: a rank holds a slice of the tokens, and computes attention for a share of the heads.

An all-to-all exchanges tokens for heads before attention and back afterwards. Attention itself is unchanged, packed or
not, and every rank has equal work whatever the trajectory lengths. Source: DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Tensor, Any], Tensor]
"""(a rank's slice, process group) -> its slice after the exchange."""


class _Exchange(torch.autograd.Function):
    """An exchange between ranks whose gradient is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


class _AllTokensOfOneHead(torch.autograd.Function):
    """[T / ranks, heads, D] to [T, 1, D] of one head, for fewer heads than ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: int, group: Any) -> Tensor:
        ctx.group, ctx.head, ctx.shape = group, head, x.shape
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered[:, head : head + 1].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].new_zeros(ctx.group.size() * ctx.shape[0], *ctx.shape[1:])
        grad[:, ctx.head : ctx.head + 1] = grads[0]
        own = grads[0].new_empty(ctx.shape)
        dist.reduce_scatter_tensor(own, grad, group=ctx.group)
        return own, None, None


def _tokens_to_heads(x: Tensor, group: Any) -> Tensor:
    """Exchange [T / ranks, heads, D] of this rank's tokens for [T, heads / ranks, D] of this rank's heads."""
    size = group.size()
    parts = x.reshape(x.shape[0], size, -1, x.shape[-1]).transpose(0, 1).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out.flatten(0, 1)


def _heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """Reverse `_tokens_to_heads`."""
    size = group.size()
    parts = x.reshape(size, x.shape[0] // size, *x.shape[1:]).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out.transpose(0, 1).flatten(1, 2)


def tokens_to_heads(x: Tensor, *, num_query_heads: int, group: Any) -> Tensor:
    """Exchange tokens for heads.

    Args:
        x: [T / ranks, heads, head_dim] queries, keys or values of a tensor rank.
        num_query_heads: Query heads of the tensor rank. Selects the key head of a rank's queries if there are fewer key
            heads than ranks.
        group: Process group of the context-parallel ranks.

    Returns:
        [T, heads of this rank, head_dim].
    """
    if x.shape[1] % group.size() == 0:
        return _Exchange.apply(x, group, _tokens_to_heads, _heads_to_tokens)  # type: ignore[no-any-return, no-untyped-call]
    first_query = group.rank() * (num_query_heads // group.size())
    head = first_query // (num_query_heads // x.shape[1])
    return _AllTokensOfOneHead.apply(x, head, group)  # type: ignore[no-any-return, no-untyped-call]


def heads_to_tokens(x: Tensor, *, group: Any) -> Tensor:
    """Exchange [T, heads / ranks, head_dim] back for [T / ranks, heads, head_dim]."""
    return _Exchange.apply(x, group, _heads_to_tokens, _tokens_to_heads)  # type: ignore[no-any-return, no-untyped-call]
