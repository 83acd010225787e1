"""Attention over a forest of prefixes: each segment attends to itself and to every segment that it continues.

All continuations of a segment attend to it in one unmasked block. The outputs of a token's blocks are merged by their
log-sum-exps. Given the merged output and log-sum-exp, the backward pass of each block is the standard one (p =
exp(score - lse), delta = sum(grad * out): FlashAttention-2, Dao 2023, arXiv:2307.08691), so no gradient flows through a
log-sum-exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_distill.megatron.attention.layout import HeadIndex, PackedLayout, causal_mask

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_MATMUL_SCORES = 2**24
"""Maximum scores of an unmasked block whose probabilities are saved; above, the fused kernel recomputes them."""


@dataclass(frozen=True, slots=True)
class _AttentionBlock:
    """Queries [B, M, D] that attend to keys [B, N, D]; if causal, M / N stacked heads with a causal mask each."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    use_matmul: bool
    scale: float

    @property
    def _num_heads(self) -> int:
        return self.q.shape[1] // self.k.shape[1] if self.is_causal else 1

    def _by_head(self, *tensors: Tensor) -> Iterator[Tensor]:
        """Return tensors [B, M, ...] as [B, heads, M / heads, ...]."""
        return (torch.unflatten(x, 1, (self._num_heads, -1)) for x in tensors)

    def _for_heads(self) -> Iterator[Tensor]:
        """Return keys and values as [B, heads, N, D]."""
        return (x.unsqueeze(1).expand(-1, self._num_heads, -1, -1) for x in (self.k, self.v))

    def attend(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return outputs [B, M, D], log-sum-exps [B, M], and the probabilities if they were materialized."""
        if not self.use_matmul:
            out, lse = _FLASH(*self._by_head(self.q), *self._for_heads(), 0.0, self.is_causal, scale=self.scale)
            return out.flatten(1, 2), lse.flatten(1, 2), None
        keys = self.k.transpose(1, 2)
        if self.is_causal:
            mask = causal_mask(self.k.shape[1], repeats=self._num_heads, like=self.q)
            scores = torch.baddbmm(mask, self.q, keys, alpha=self.scale)
        else:
            scores = torch.bmm(self.q, keys).mul_(self.scale)
        largest = scores.amax(-1)
        probabilities = torch.softmax(scores, -1)
        lse = largest - probabilities.amax(-1).log_()  # never log(0): the largest probability is at least 1 / N
        return torch.bmm(probabilities, self.v), lse, probabilities

    def gradients(
        self, grad: Tensor, merged: tuple[Tensor, Tensor, Tensor], own: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, keys and values from that of the merged output.

        Args:
            grad: [B, M, D] gradient of the merged output.
            merged: Output [B, M, D], log-sum-exp [B, M] and sum(grad * output) [B, M] over all blocks.
            own: Log-sum-exp [B, M] and probabilities of this block.
        """
        (out, total, delta), (lse, probabilities) = merged, own
        if probabilities is None:
            args = self._by_head(grad, self.q), self._for_heads(), self._by_head(out, total.to(lse.dtype))
            grads = _FLASH_BACKWARD(*(x for some in args for x in some), 0.0, self.is_causal, scale=self.scale)
            return grads[0].flatten(1, 2), grads[1].sum(1), grads[2].sum(1)
        share = (lse - total).exp_().unsqueeze(-1)
        grad = grad * share
        grad_v = torch.bmm(probabilities.transpose(1, 2), grad)
        weighted = (delta.unsqueeze(-1) * share).expand(-1, -1, self.k.shape[1])
        grad_scores = torch.baddbmm(weighted, grad, self.v.transpose(1, 2), beta=-1.0)
        grad_scores.mul_(probabilities).mul_(self.scale)
        return torch.bmm(grad_scores, self.k), torch.bmm(grad_scores.transpose(1, 2), self.q), grad_v


class _BlockPositions:
    """Positions of each block's queries and keys: in buckets of segments, then in spans of the forest."""

    def __init__(self, layout: PackedLayout, *, num_heads: int, num_groups: int) -> None:
        self.layout, self.num_groups = layout, num_groups
        self.heads, self.groups = layout.index(num_heads), layout.index(num_groups)

    def in_buckets(self, x: Tensor, index: HeadIndex, *, has_padding: bool = True) -> list[Tensor]:
        """Return [T, heads, ...] as [rows * groups, heads of a group * length, ...] for each bucket."""
        flat = x.flatten(0, 1).index_select(0, index.to_buckets)
        if not has_padding:
            flat.index_fill_(0, index.padding, 0.0)
        sizes = [rows * length * x.shape[1] for rows, length in self.layout.buckets]
        shapes = [(rows * self.num_groups, -1, *x.shape[2:]) for rows, _ in self.layout.buckets]
        return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]

    def from_buckets(self, parts: list[Tensor], index: HeadIndex, num_heads: int) -> Tensor:
        """Reverse `in_buckets`, without the padding."""
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        return torch.unflatten(flat.index_select(0, index.from_buckets), 0, (-1, num_heads))

    def in_span(self, x: Tensor) -> Tensor:
        """Return [L, heads, ...] as [groups, L * heads of a group, ...]."""
        return torch.unflatten(x, 1, (self.num_groups, -1)).transpose(0, 1).flatten(1, 2)

    def from_span(self, x: Tensor, num_heads: int) -> Tensor:
        """Reverse `in_span`."""
        return torch.unflatten(x, 1, (-1, num_heads // self.num_groups)).transpose(0, 1).flatten(1, 2)

    def blocks(self, qkv: tuple[Tensor, Tensor, Tensor], *, scale: float, matmul_length: int) -> list[_AttentionBlock]:
        """Return the blocks of queries [T, heads, D], keys and values [T, groups, D]."""
        can_matmul = qkv[0].dtype in (torch.float32, torch.float64)
        indices = (self.heads, self.groups, self.groups)
        found = []
        columns = (self.in_buckets(x, index) for x, index in zip(qkv, indices, strict=True))
        for q, k, v in zip(*columns, strict=True):
            use_matmul = can_matmul and k.shape[1] <= matmul_length
            found.append(_AttentionBlock(q, k, v, is_causal=True, use_matmul=use_matmul, scale=scale))
        for start, middle, stop in self.layout.spans:
            q, k, v = (
                self.in_span(x[a:b]) for x, (a, b) in zip(qkv, ((middle, stop), *[(start, middle)] * 2), strict=True)
            )
            use_matmul = can_matmul and matmul_length > 0 and q.shape[0] * q.shape[1] * k.shape[1] <= _MATMUL_SCORES
            found.append(_AttentionBlock(q, k, v, is_causal=False, use_matmul=use_matmul, scale=scale))
        return found


class _PrefixAttention(torch.autograd.Function):
    """Autograd function of `prefix_attention`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, matmul_length: int
    ) -> Tensor:
        num_heads = q.shape[1]
        places = _BlockPositions(layout, num_heads=num_heads, num_groups=k.shape[1])
        blocks = places.blocks((q, k, v), scale=scale, matmul_length=matmul_length)
        outs, lses, probabilities = (list(column) for column in zip(*(block.attend() for block in blocks), strict=True))
        num_buckets = len(layout.buckets)
        own_lse = places.from_buckets(lses[:num_buckets], places.heads, num_heads)
        total = own_lse.clone()
        crossing = [places.from_span(lse, num_heads) for lse in lses[num_buckets:]]
        for (_, middle, stop), lse in zip(layout.spans, crossing, strict=True):
            torch.logaddexp(total[middle:stop], lse, out=total[middle:stop])
        out = places.from_buckets(outs[:num_buckets], places.heads, num_heads).to(total.dtype)
        out.mul_((own_lse - total).exp_().unsqueeze(-1))
        for (_, middle, stop), part, lse in zip(layout.spans, outs[num_buckets:], crossing, strict=True):
            share = (lse - total[middle:stop]).exp_().unsqueeze(-1)
            out[middle:stop].addcmul_(places.from_span(part, num_heads).to(total.dtype), share)
        out = out.to(q.dtype)
        ctx.has_probabilities = [one is not None for one in probabilities]
        kept = [one for one in probabilities if one is not None]
        ctx.save_for_backward(q, k, v, out, total, *lses, *kept)
        ctx.layout, ctx.scale, ctx.matmul_length = layout, scale, matmul_length
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total, *rest = ctx.saved_tensors
        num_heads, num_groups = q.shape[1], k.shape[1]
        places = _BlockPositions(ctx.layout, num_heads=num_heads, num_groups=num_groups)
        blocks = places.blocks((q, k, v), scale=ctx.scale, matmul_length=ctx.matmul_length)
        lses, kept = rest[: len(blocks)], iter(rest[len(blocks) :])
        own = [(lse, next(kept) if has else None) for lse, has in zip(lses, ctx.has_probabilities, strict=True)]
        grad = grads[0].contiguous()
        delta = (grad * out).sum(-1, dtype=total.dtype)
        values = (grad, out, total, delta)
        # A padding place repeats its segment's last token, so its gradient and delta must be 0.
        columns = [places.in_buckets(x, places.heads, has_padding=x is out or x is total) for x in values]
        merged = list(zip(*columns, strict=True))
        merged += [tuple(places.in_span(x[middle:stop]) for x in values) for _, middle, stop in ctx.layout.spans]
        found = [block.gradients(one[0], one[1:], of) for block, one, of in zip(blocks, merged, own, strict=True)]
        num_buckets = len(ctx.layout.buckets)
        counts = (num_heads, num_groups, num_groups)
        indices = (places.heads, places.groups, places.groups)
        in_buckets = zip(*found[:num_buckets], strict=True)
        sums = [places.from_buckets(list(x), i, n) for x, i, n in zip(in_buckets, indices, counts, strict=True)]
        for (start, middle, stop), parts in zip(ctx.layout.spans, found[num_buckets:], strict=True):
            stretches = ((middle, stop), (start, middle), (start, middle))
            for whole, part, (a, b), count in zip(sums, parts, stretches, counts, strict=True):
                whole[a:b] += places.from_span(part, count)
        return *sums, None, None, None


def prefix_attention(
    qkv: tuple[Tensor, Tensor, Tensor], layout: PackedLayout, *, scale: float, matmul_length: int
) -> Tensor:
    """Compute attention of each token to the tokens before it on its path through the forest; on a CPU.

    Args:
        qkv: Queries [T, heads, D], keys and values [T, groups, D], after the rotary embedding.
        layout: Layout with the buckets of the segments and the spans of the forest.
        scale: Factor on the scores.
        matmul_length: Maximum segment length at which batched products beat the fused kernel; 0 to always use the
            kernel.

    Returns:
        [T, heads, D].
    """
    return _PrefixAttention.apply(*qkv, layout, scale, matmul_length)  # type: ignore[no-any-return, no-untyped-call]
