"""Where each token of a pack goes in attention: buckets of segments of nearly equal length, or flash blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from rl_distill.megatron.attention.varlen import Block, Span, plan_blocks

PACKED_FORMAT = "packed"
"""Not megatron's "thd", whose rotary embedding loops over the sequences in Python."""

Places = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token of each place of a bucket [rows, length], and whether the place is real."""

_SLACK = 0.05
"""Share of padding for which lengths join a bucket; on a CPU exact runs took as long, a GPU has fewer launches."""


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """Rows of a [T * heads, head_dim] tensor in the order of the buckets, and back.

    Attributes:
        to_buckets: [P * heads] int64; a padded place holds its trajectory's last token.
        from_buckets: [T * heads] int64.
        padding: Places in the buckets that hold padding, int64.
    """

    to_buckets: Tensor
    from_buckets: Tensor
    padding: Tensor


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]
    """A pack's segments, handed through megatron's layers to the core attention.

    It travels as an argument, so that a layer which is recomputed sees the pack that it saw before.

    Attributes:
        buckets: (trajectories, length) of each bucket, in the order of the bucket places.
        cos: [T, 1, 1, rotated channels] float32 of the rotary embedding.
        sin: [T, 1, 1, rotated channels / 2] float32.
        heads: HeadIndex by number of heads.
        kept: [M] int64 tokens whose hidden states leave the last layer, None for all.
        experts: [T, layers, top_k] int64 experts that the engine chose, -1 where it gave none; None where it
            gave none at all. T counts this rank's tokens, layers all of the policy.
        routed: [layers, 2] int64, written by this rank's layers: tokens that took given experts, and those of them for
            which the router would have chosen others.
        spans: Of the segments that others go on from, beside the buckets.
        blocks: Calls of flash attention in the place of buckets, heads and spans; () where these have the pack.
    """

    buckets: tuple[tuple[int, int], ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None
    heads: dict[int, HeadIndex] = field(default_factory=dict)
    kept: Tensor | None = None
    experts: Tensor | None = None
    routed: Tensor | None = None
    spans: tuple[Span, ...] = ()
    blocks: tuple[Block, ...] = ()


def causal_mask(length: int, *, repeats: int, like: Tensor) -> Tensor:
    """[repeats * length, length] to add to scores."""
    mask = torch.full((length, length), -math.inf, dtype=like.dtype, device=like.device).triu_(1)
    return mask.repeat(repeats, 1)


def plan_buckets(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Group trajectories so that a bucket costs one call and little padding.

    Args:
        lengths: [S] tokens of each trajectory.

    Returns:
        Indices of the trajectories of each bucket, longest first.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    buckets = []
    start = 0
    while start < len(order):
        longest = int(ordered[start])
        stop = int(np.searchsorted(-ordered, -longest * (1 - _SLACK), side="right"))
        buckets.append(order[start:stop])
        start = stop
    return buckets


def _token_places(offsets: NDArray[np.int64], buckets: Sequence[NDArray[np.int64]]) -> list[Places]:
    """Places of each bucket; a padded one repeats its trajectory's last token."""
    places = []
    for rows in buckets:
        starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
        steps = np.arange(int(lengths.max()), dtype=np.int64)
        is_real = steps < lengths[:, None]
        places.append((starts[:, None] + np.minimum(steps, lengths[:, None] - 1), is_real))
    return places


def _head_index(places: Sequence[Places], *, num_tokens: int, num_heads: int, device: torch.device) -> HeadIndex:
    head = np.arange(num_heads, dtype=np.int64)[None, :, None]
    to_buckets = np.concatenate([(tokens[:, None, :] * num_heads + head).reshape(-1) for tokens, _ in places])
    is_real = np.concatenate(
        [np.broadcast_to(real[:, None, :], (len(real), num_heads, real.shape[1])).reshape(-1) for _, real in places]
    )
    from_buckets = np.empty(num_tokens * num_heads, dtype=np.int64)
    from_buckets[to_buckets[is_real]] = np.flatnonzero(is_real)
    arrays = (to_buckets, from_buckets, np.flatnonzero(~is_real))
    return HeadIndex(*(torch.from_numpy(array).to(device) for array in arrays))


def rotary_tables(position_ids: Tensor, *, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos [T, 1, 1, rotated channels] and sin, of half as many, of positions, float32."""
    angles = position_ids.float()[:, None] * frequencies.to(position_ids.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, None, None], sin[:, None, None]


def packed_layout(
    position_ids: Tensor,
    offsets: NDArray[np.int64],
    *,
    frequencies: Tensor,
    head_counts: Sequence[int] | None,
    spans: tuple[Span, ...] = (),
) -> PackedLayout:
    """Lay out a pack.

    Args:
        position_ids: [T] int64.
        offsets: [S + 1] int64 of the segments; every one has at least one token.
        frequencies: [rotated channels / 2] float32 of the rotary embedding; see `rotary_frequencies`.
        head_counts: Numbers of heads (of queries, of keys) on this rank, for buckets; None for flash attention.
        spans: Of the segments' forest.
    """
    cos, sin = rotary_tables(position_ids, frequencies=frequencies)
    device = position_ids.device
    if head_counts is None:
        blocks = plan_blocks(offsets, spans, device=device)
        return PackedLayout(qkv_format=PACKED_FORMAT, cos=cos, sin=sin, blocks=blocks)
    buckets = plan_buckets(np.diff(offsets))
    places = _token_places(offsets, buckets)
    heads = {
        count: _head_index(places, num_tokens=int(offsets[-1]), num_heads=count, device=device)
        for count in set(head_counts)
    }
    shapes = tuple((len(tokens), tokens.shape[1]) for tokens, _ in places)
    return PackedLayout(qkv_format=PACKED_FORMAT, buckets=shapes, cos=cos, sin=sin, heads=heads, spans=spans)
