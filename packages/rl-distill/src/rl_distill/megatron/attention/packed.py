"""Core attention over a pack: rotary embedding, then flash attention or one call per bucket of segments.

Without shared prefixes, segments are complete trajectories; otherwise `prefix_attention` computes the buckets. Padding
follows its segment's tokens, so the causal mask alone hides it from them, and its outputs are discarded.

With context parallelism, a rank holds a slice of the tokens and computes attention for a share of the heads. An
all-to-all exchanges tokens for heads before attention and back afterwards, so every rank has equal work whatever the
trajectory lengths. Source: DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rl_core.errors import ShapeError
from rl_distill.linear_map import linear_map
from rl_distill.megatron.attention.layout import PACKED_FORMAT, PackedLayout, causal_mask, rotated
from rl_distill.megatron.attention.prefixes import prefix_attention
from rl_distill.megatron.attention.varlen import varlen_attention


def _all_tokens_of_head(x: Tensor, head: int, group: Any) -> Tensor:
    """Gather [T, 1, D] of one head from [T / ranks, heads, D], for fewer heads than ranks."""
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered[:, head : head + 1].contiguous()


def _own_tokens_of_heads(grad: Tensor, head: int, group: Any, num_heads: int) -> Tensor:
    """Sum the ranks' gradients [T, 1, D] of their heads as [T / ranks, heads, D] of this rank's tokens."""
    of_heads = grad.new_zeros(grad.shape[0], num_heads, grad.shape[2])
    of_heads[:, head : head + 1] = grad
    own = grad.new_empty(grad.shape[0] // group.size(), *of_heads.shape[1:])
    dist.reduce_scatter_tensor(own, of_heads, group=group)
    return own


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
        to_heads, to_tokens = partial(_tokens_to_heads, group=group), partial(_heads_to_tokens, group=group)
        return linear_map(x, forward=to_heads, backward=to_tokens)
    first_query = group.rank() * (num_query_heads // group.size())
    head = first_query // (num_query_heads // x.shape[1])
    gather = partial(_all_tokens_of_head, head=head, group=group)
    scatter = partial(_own_tokens_of_heads, head=head, group=group, num_heads=x.shape[1])
    return linear_map(x, forward=gather, backward=scatter)


def heads_to_tokens(x: Tensor, *, group: Any) -> Tensor:
    """Exchange [T, heads / ranks, head_dim] back for [T / ranks, heads, head_dim]."""
    to_heads, to_tokens = partial(_tokens_to_heads, group=group), partial(_heads_to_tokens, group=group)
    return linear_map(x, forward=to_tokens, backward=to_heads)


MATMUL_LENGTH = 192
"""Maximum length at which batched products beat the fused kernel on a CPU in float32; memory is quadratic in it."""

Buckets = tuple[tuple[int, int], ...]
"""(trajectories, length) of each bucket."""

QueryKeyValue = tuple[Tensor, Tensor, Tensor]


class _MatmulAttention(torch.autograd.Function):
    """Causal attention of many short trajectories by batched products, with the heads of a group stacked.

    q is [P * heads, head_dim], k and v are [P * groups, head_dim], in bucket order.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, buckets: Buckets, num_groups: int, scale: float) -> Tensor:
        out = torch.empty_like(q)
        probabilities = []
        for shape, (qs, ks, vs, outs) in zip(buckets, _bucket_views(buckets, num_groups, q, k, v, out), strict=True):
            mask = causal_mask(shape[1], repeats=qs.shape[1] // shape[1], like=q)
            scores = torch.baddbmm(mask, qs, ks.transpose(1, 2), alpha=scale)
            probability = torch.softmax(scores, dim=-1)
            torch.bmm(probability, vs, out=outs)
            probabilities.append(probability)
        ctx.save_for_backward(q, k, v, *probabilities)
        ctx.buckets, ctx.num_groups, ctx.scale = buckets, num_groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = (q, k, v, grads[0].contiguous(), grad_q, grad_k, grad_v)
        views = _bucket_views(ctx.buckets, ctx.num_groups, *tensors)
        for probability, (qs, ks, vs, grad_outs, grad_qs, grad_ks, grad_vs) in zip(probabilities, views, strict=True):
            torch.bmm(probability.transpose(1, 2), grad_outs, out=grad_vs)
            grad_probability = torch.bmm(grad_outs, vs.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probability, probability, -1, q.dtype)
            grad_scores.mul_(ctx.scale)
            torch.bmm(grad_scores, ks, out=grad_qs)
            torch.bmm(grad_scores.transpose(1, 2), qs, out=grad_ks)
        return grad_q, grad_k, grad_v, None, None, None


def _bucket_views(buckets: Buckets, num_groups: int, *flats: Tensor) -> list[tuple[Tensor, ...]]:
    """Return for each bucket each flat tensor as [rows * groups, heads of a group * length, head_dim]."""
    parts = zip(*(split_buckets(flat, buckets) for flat in flats), strict=True)
    return [
        tuple(x.view(rows * num_groups, -1, x.shape[1]) for x in of_bucket)
        for (rows, _), of_bucket in zip(buckets, parts, strict=True)
    ]


def split_buckets(flat: Tensor, buckets: Buckets) -> tuple[Tensor, ...]:
    """Split a flat tensor [P * heads, head_dim] into the rows of each bucket."""
    heads = flat.shape[0] // _num_places(buckets)
    return torch.split(flat, [rows * length * heads for rows, length in buckets])


def _num_places(buckets: Buckets) -> int:
    return sum(rows * length for rows, length in buckets)


def _fused_attention(qkv: QueryKeyValue, buckets: Buckets, scale: float) -> Tensor:
    """Call scaled_dot_product_attention per bucket, on the layout of `_MatmulAttention`."""
    outs = []
    for (rows, length), parts in zip(buckets, zip(*(split_buckets(x, buckets) for x in qkv), strict=True), strict=True):
        q, k, v = (part.view(rows, -1, length, part.shape[1]) for part in parts)
        has_groups = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=has_groups)
        outs.append(out.reshape(-1, q.shape[-1]))
    return torch.cat(outs)


def _matmul_attention(qkv: QueryKeyValue, buckets: Buckets, scale: float) -> Tensor:
    num_groups = qkv[1].shape[0] // _num_places(buckets)
    return _MatmulAttention.apply(*qkv, buckets, num_groups, scale)  # type: ignore[no-any-return, no-untyped-call]


def bucket_attention(qkv: QueryKeyValue, buckets: Buckets, *, scale: float) -> Tensor:
    """Compute causal attention within each trajectory.

    Args:
        qkv: Queries [P * heads, head_dim], keys and values [P * groups, head_dim] in bucket order: [rows, heads,
            length] per bucket.
        buckets: (rows, length) of each bucket, longest first.
        scale: Factor on the scores.

    Returns:
        [P * heads, head_dim] in bucket order.
    """
    use_matmul = qkv[0].device.type == "cpu" and qkv[0].dtype == torch.float32
    num_long = sum(length > MATMUL_LENGTH for _, length in buckets) if use_matmul else len(buckets)
    if num_long == 0:
        return _matmul_attention(qkv, buckets, scale)
    if num_long == len(buckets):
        return _fused_attention(qkv, buckets, scale)
    num_places, num_long_places = _num_places(buckets), _num_places(buckets[:num_long])
    q, k, v = (x.tensor_split([num_long_places * (x.shape[0] // num_places)]) for x in qkv)
    long = _fused_attention((q[0], k[0], v[0]), buckets[:num_long], scale)
    return torch.cat((long, _matmul_attention((q[1], k[1], v[1]), buckets[num_long:], scale)))


def packed_attention(qkv: QueryKeyValue, layout: PackedLayout, *, scale: float) -> Tensor:
    """Attend within each trajectory of a pack.

    Args:
        qkv: Queries [T, heads, D], keys and values [T, groups, D], after the rotary embedding.
        layout: Layout of the pack.
        scale: Factor on the scores.

    Returns:
        [T, heads, D].
    """
    if layout.blocks:
        return varlen_attention(list(qkv), layout.blocks, scale=scale)
    if layout.spans:
        return prefix_attention(qkv, layout, scale=scale, matmul_length=MATMUL_LENGTH)
    indices = [layout.index(x.shape[1]) for x in qkv]
    q, k, v = (
        reordered(x.reshape(-1, x.shape[-1]), index.to_buckets, index.from_buckets, None)
        for x, index in zip(qkv, indices, strict=True)
    )
    flat = bucket_attention((q, k, v), layout.buckets, scale=scale)
    heads = indices[0]
    return reordered(flat, heads.from_buckets, heads.to_buckets, heads.padding).view(qkv[0].shape)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's core attention for packs. It needs a PackedLayout as packed_seq_params."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: object) -> None:
        """Build the attention with Megatron's arguments.

        Args:
            config: Megatron's TransformerConfig.
            layer_number: Number of the layer, from 1.
            softmax_scale: Scale of the scores; None for 1 / sqrt(head_dim).
        """
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        is_shared = config.context_parallel_size > 1
        self._context_group = parallel_state.get_context_parallel_group() if is_shared else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002 - megatron's signature
        packed_seq_params: PackedLayout | None = None,
        **_: object,
    ) -> Tensor:
        """Attend within each trajectory.

        Args:
            query: [T, 1, heads, head_dim] before the rotary embedding.
            key: [T, 1, groups, head_dim] before the rotary embedding.
            value: [T, 1, groups, head_dim].
            attention_mask: Not used; attention is causal.
            packed_seq_params: The pack's layout.

        Returns:
            [T, 1, heads * head_dim].

        Raises:
            ShapeError: packed_seq_params is not a PackedLayout.
        """
        layout = packed_seq_params
        if layout is None or layout.qkv_format != PACKED_FORMAT or layout.cos is None or layout.sin is None:
            raise ShapeError("PackedAttention needs a PackedLayout as packed_seq_params. Create it with packed_layout.")
        cos, sin = layout.cos.to(query.dtype), layout.sin.to(query.dtype)
        q, k = (rotated(x, cos, sin, is_fused=self.config.kernels.is_fused).squeeze(1) for x in (query, key))
        qkv = [q, k, value.squeeze(1)]
        if self._context_group is not None:  # all tokens of this rank's heads, instead of all heads of its tokens
            num_heads = query.shape[2]
            qkv = [tokens_to_heads(x, num_query_heads=num_heads, group=self._context_group) for x in qkv]
        out = packed_attention((qkv[0], qkv[1], qkv[2]), layout, scale=self.scale)
        if self._context_group is not None:
            out = heads_to_tokens(out, group=self._context_group)
        return out.reshape(query.shape[0], 1, -1)


def reordered(rows: Tensor, there: Tensor, back: Tensor, padding: Tensor | None) -> Tensor:
    """Reorder rows. The gradient is reordered back, and is 0 for padding."""

    def reorder_back(grad: Tensor) -> Tensor:
        reordered = grad.index_select(0, back)
        return reordered if padding is None or not len(padding) else reordered.index_fill_(0, padding, 0.0)

    return linear_map(rows, forward=lambda rows: rows.index_select(0, there), backward=reorder_back)
