"""Core attention over a pack: rotary embedding, then one call for each bucket of trajectories.

A padded place stands after its trajectory's tokens, so that the causal mask alone keeps it out of their
attention, and nothing comes back from it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.transformer.module import MegatronModule
from rl_core.errors import ShapeError
from torch import Tensor

from rl_distill.megatron.layout import PACKED_FORMAT, HeadIndex, PackedLayout

_MATMUL_LENGTH = 256
"""Up to this length, on a CPU in float32, two batched products beat the fused kernel; memory grows with its square."""

Bucket = tuple[int, int]


class _Rotary(torch.autograd.Function):
    """Rotate [T, 1, heads, head_dim] by cos and sin; the gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, sign=-1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = x * cos
    out[..., :half].addcmul_(second, sin, value=-sign)
    out[..., half:].addcmul_(first, sin, value=sign)
    return out


class _ToBuckets(torch.autograd.Function):
    """Rows in bucket order; gradients of padding are dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: HeadIndex) -> Tensor:
        ctx.index = index
        return rows.index_select(0, index.to_buckets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.index.from_buckets), None


class _FromBuckets(torch.autograd.Function):
    """Rows in the pack's order; padding gets zero gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: HeadIndex) -> Tensor:
        ctx.index = index
        return rows.index_select(0, index.from_buckets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        index = ctx.index
        grad = grads[0].index_select(0, index.to_buckets)
        if len(index.padding):
            grad.index_fill_(0, index.padding, 0.0)
        return grad, None


class _MatmulAttention(torch.autograd.Function):
    """Causal attention of many short trajectories by batched products, the heads of a group stacked.

    q [P * heads, head_dim], k and v [P * groups, head_dim], in bucket order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, buckets: tuple[Bucket, ...], num_groups: int, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        probabilities = []
        for shape, (qs, ks, vs, outs) in zip(buckets, _bucket_views(buckets, num_groups, q, k, v, out), strict=True):
            mask = _causal_mask(shape[1], repeats=qs.shape[1] // shape[1], like=q)
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


def _bucket_views(buckets: tuple[Bucket, ...], num_groups: int, *flats: Tensor) -> list[tuple[Tensor, ...]]:
    """For each bucket, each flat tensor as [rows * groups, heads of a group * length, head_dim]."""
    num_places = sum(rows * length for rows, length in buckets)
    columns = []
    for flat in flats:
        heads = flat.shape[0] // num_places
        parts = flat.split([rows * length * heads for rows, length in buckets])
        shapes = [(rows * num_groups, -1, flat.shape[1]) for rows, _ in buckets]
        columns.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    return list(zip(*columns, strict=True))


def _causal_mask(length: int, *, repeats: int, like: Tensor) -> Tensor:
    mask = torch.full((length, length), -math.inf, dtype=like.dtype, device=like.device).triu_(1)
    return mask.repeat(repeats, 1)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, buckets: tuple[Bucket, ...], scale: float) -> Tensor:
    """One scaled_dot_product_attention a bucket, on the layout of _MatmulAttention."""
    num_places = sum(rows * length for rows, length in buckets)
    views = []
    for flat in (q, k, v):
        heads = flat.shape[0] // num_places
        parts = flat.split([rows * length * heads for rows, length in buckets])
        views.append([p.view(r, heads, n, flat.shape[1]) for p, (r, n) in zip(parts, buckets, strict=True)])
    outs = [
        F.scaled_dot_product_attention(*bucket, is_causal=True, scale=scale, enable_gqa=q.shape[0] != k.shape[0])
        for bucket in zip(*views, strict=True)
    ]
    return torch.cat([out.reshape(-1, q.shape[1]) for out in outs])


def bucket_attention(q: Tensor, k: Tensor, v: Tensor, buckets: tuple[Bucket, ...], scale: float) -> Tensor:
    """Causal attention within each trajectory.

    Args:
        q: [P * heads, head_dim] in bucket order: for each bucket [rows, heads, length].
        k: [P * groups, head_dim], likewise.
        v: [P * groups, head_dim], likewise.
        buckets: (rows, length) of each bucket, longest first.
        scale: Of the scores.

    Returns:
        [P * heads, head_dim] in bucket order.
    """
    use_matmul = q.device.type == "cpu" and q.dtype == torch.float32
    num_long = sum(length > _MATMUL_LENGTH for _, length in buckets) if use_matmul else len(buckets)
    num_places = sum(rows * length for rows, length in buckets)
    num_groups = k.shape[0] // num_places
    if num_long == 0:
        return _matmul_attention(q, k, v, buckets, num_groups, scale)
    if num_long == len(buckets):
        return _fused_attention(q, k, v, buckets, scale)
    long_places = sum(rows * length for rows, length in buckets[:num_long])
    cuts = [long_places * (x.shape[0] // num_places) for x in (q, k, v)]
    heads = [x[:cut] for x, cut in zip((q, k, v), cuts, strict=True)]
    tails = [x[cut:] for x, cut in zip((q, k, v), cuts, strict=True)]
    return torch.cat(
        (
            _fused_attention(*heads, buckets[:num_long], scale),
            _matmul_attention(*tails, buckets[num_long:], num_groups, scale),
        )
    )


def _matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, buckets: tuple[Bucket, ...], num_groups: int, scale: float
) -> Tensor:
    return _MatmulAttention.apply(q, k, v, buckets, num_groups, scale)  # type: ignore[no-any-return, no-untyped-call]


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """megatron's core attention for packs; takes a PackedLayout as packed_seq_params."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: object) -> None:
        """Take what megatron gives a core attention.

        Args:
            config: megatron's TransformerConfig.
            layer_number: From 1.
            softmax_scale: Scale of the scores; None for 1 / sqrt(head_dim).
        """
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
            key: [T, 1, groups, head_dim], likewise.
            value: [T, 1, groups, head_dim].
            attention_mask: Not used; attention is causal.
            packed_seq_params: The pack's layout.

        Returns:
            [T, 1, heads * head_dim].

        Raises:
            ShapeError: There is no PackedLayout.
        """
        layout = packed_seq_params
        if layout is None or layout.qkv_format != PACKED_FORMAT or layout.cos is None or layout.sin is None:
            raise ShapeError("PackedAttention needs a PackedLayout as packed_seq_params; make it with packed_layout.")
        cos, sin = layout.cos.to(query.dtype), layout.sin.to(query.dtype)
        head_dim = query.shape[-1]
        flats = []
        for x, is_rotated in ((query, True), (key, True), (value, False)):
            rows = _Rotary.apply(x, cos, sin) if is_rotated else x  # type: ignore[no-untyped-call]
            flats.append(_ToBuckets.apply(rows.reshape(-1, head_dim), layout.heads[x.shape[2]]))  # type: ignore[no-untyped-call]
        out = bucket_attention(flats[0], flats[1], flats[2], layout.buckets, self.scale)
        out = _FromBuckets.apply(out, layout.heads[query.shape[2]])  # type: ignore[no-untyped-call]
        return out.view(query.shape[0], 1, -1)  # type: ignore[no-any-return]
