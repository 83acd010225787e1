"""Lay out the tokens of a pack for attention: in buckets of segments of similar length, or in flash blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from rl_distill.architecture.policy_config import Llama3RopeScaling, PolicyConfig
from rl_distill.linear_map import linear_map
from rl_distill.megatron.attention.varlen import FlashCall, Span, plan_blocks
from rl_distill.megatron.layers import compiled


def rotary_frequencies(config: PolicyConfig) -> Tensor:
    """Return the angle per position step of each pair of a head's rotated channels.

    Args:
        config: The policy's configuration, with base and scaling of the embedding.

    Returns:
        [rotated channels / 2] float32.

    Source: Su et al. 2021, arXiv:2104.09864; Llama 3's scaling: Grattafiori et al. 2024, arXiv:2407.21783.
    """
    rotary_dim = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (config.rope_base**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(frequencies, scaling)
    return frequencies / scaling.factor


def _llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Apply Llama 3's scaling: long wavelengths are stretched, short ones unchanged, those between interpolated."""
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > length / low, wavelengths < length / high
    stretched = torch.where(is_long, frequencies / scaling.factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    mixed = (1 - share) * stretched / scaling.factor + share * stretched
    return torch.where(~is_short & ~is_long, mixed, stretched)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, is_fused: bool) -> Tensor:
    """Rotate each head by the angles of its position.

    Args:
        x: [T, 1, heads, head_dim]; channels beyond those of the tables are unchanged.
        cos: [T, 1, 1, rotated channels].
        sin: [T, 1, 1, rotated channels / 2].
        is_fused: True to compute in one compiled pass where possible.
    """
    rotate = compiled(_rotate, x.device.type) if is_fused else _rotate
    return linear_map(x, cos, sin, forward=rotate, backward=lambda grad, cos, sin: rotate(grad, cos, -sin))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size, half = cos.shape[-1], sin.shape[-1]
    out = x * cos if size == x.shape[-1] else torch.cat((x[..., :size] * cos, x[..., size:]), dim=-1)
    out[..., :half].addcmul_(x[..., half:size], sin, value=-1.0)
    out[..., half:size].addcmul_(x[..., :half], sin)
    return out


PACKED_FORMAT = "packed"
"""Format name other than Megatron's "thd", whose rotary embedding loops over the sequences in Python."""

Places = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token of each place in a bucket [rows, length], and whether the place is real rather than padding."""

_SLACK = 0.05
"""Maximum share of padding per row of a bucket. No padding is as fast on a CPU, but needs more GPU launches."""


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """Indices that reorder rows of a [T * heads, head_dim] tensor into the buckets and back.

    Attributes:
        to_buckets: [P * heads] int64; a padding place repeats its trajectory's last token.
        from_buckets: [T * heads] int64.
        padding: int64 places of padding in the buckets.
    """

    to_buckets: Tensor
    from_buckets: Tensor
    padding: Tensor

    def for_heads(self, num_heads: int, buckets: Sequence[tuple[int, int]]) -> "HeadIndex":
        """Return the indices of several heads from those of one."""
        head = torch.arange(num_heads, device=self.to_buckets.device)[:, None]
        is_padding = torch.zeros_like(self.to_buckets, dtype=torch.bool).index_fill_(0, self.padding, True)
        sizes = [rows * length for rows, length in buckets]
        of_buckets = (torch.split(x, sizes) for x in (self.to_buckets, is_padding))
        tokens, paddings = [], []
        for (rows, length), token, padding in zip(buckets, *of_buckets, strict=True):
            tokens.append((token.view(rows, 1, length) * num_heads + head).flatten())
            paddings.append(padding.view(rows, 1, length).expand(rows, num_heads, length).flatten())
        to_buckets, is_filled = torch.cat(tokens), torch.cat(paddings)
        real = (~is_filled).nonzero().flatten()
        from_buckets = torch.empty(len(self.from_buckets) * num_heads, dtype=torch.int64, device=real.device)
        from_buckets[to_buckets[real]] = real
        return HeadIndex(to_buckets, from_buckets, is_filled.nonzero().flatten())


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]
    """Layout of a pack's segments, which Megatron's layers pass to the core attention.

    It is passed as an argument so that a recomputed layer sees the same pack as before.

    Attributes:
        buckets: (trajectories, length) of each bucket, in the order of the bucket places.
        cos: [T, 1, 1, rotated channels] float32 cosines of the rotary embedding.
        sin: [T, 1, 1, rotated channels / 2] float32 sines.
        heads: HeadIndex by number of heads.
        kept: [M] int64 tokens whose hidden states leave the last layer; None for all.
        experts: [T, layers, top_k] int64 experts that the engine chose, -1 where unknown; None without replay. T counts
            this rank's tokens, and layers all layers of the policy.
        routed: [layers, 2] int64 counts written by this rank's layers: tokens that used given experts, and those among
            them for which the router would have chosen others.
        spans: Spans of the segments with continuations; used with the buckets.
        blocks: Calls of flash attention, which replace buckets, heads and spans; empty with buckets.
    """

    buckets: tuple[tuple[int, int], ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None
    heads: dict[int, HeadIndex] = field(default_factory=dict)
    kept: Tensor | None = None
    experts: Tensor | None = None
    routed: Tensor | None = None
    spans: tuple[Span, ...] = ()
    blocks: tuple[FlashCall, ...] = ()

    def index(self, num_heads: int) -> HeadIndex:
        """Return the indices for a number of heads."""
        if num_heads not in self.heads:
            self.heads[num_heads] = self.heads[1].for_heads(num_heads, self.buckets)
        return self.heads[num_heads]


def causal_mask(length: int, *, repeats: int, like: Tensor) -> Tensor:
    """Return a causal mask [repeats * length, length] to add to scores."""
    mask = torch.full((length, length), -math.inf, dtype=like.dtype, device=like.device).triu_(1)
    return mask.repeat(repeats, 1)


def plan_buckets(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Group trajectories of similar length into buckets, each computed in one call with little padding.

    Args:
        lengths: [S] number of tokens of each trajectory.

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
    """Return the places of each bucket; padding repeats the trajectory's last token."""
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
    """Return float32 cosines [T, 1, 1, rotated channels] and sines [T, 1, 1, rotated channels / 2] of positions."""
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
    has_blocks: bool | None = None,
) -> PackedLayout:
    """Lay out a pack.

    Args:
        position_ids: [T] int64.
        offsets: [S + 1] int64 offsets of the segments, each of at least one token.
        frequencies: [rotated channels / 2] float32 of the rotary embedding; see `rotary_frequencies`.
        head_counts: Number of query heads and of key heads on this rank, for buckets; None for flash attention.
        spans: Spans of the forest of segments.
        has_blocks: True to plan calls of flash attention too; None plans them without buckets.
    """
    cos, sin = rotary_tables(position_ids, frequencies=frequencies)
    device = position_ids.device
    blocks: tuple[FlashCall, ...] = ()
    if has_blocks or head_counts is None:
        blocks = plan_blocks(offsets, spans, device=device)
    if head_counts is None:
        return PackedLayout(qkv_format=PACKED_FORMAT, cos=cos, sin=sin, blocks=blocks)
    buckets = plan_buckets(np.diff(offsets))
    places = _token_places(offsets, buckets)
    heads = {
        count: _head_index(places, num_tokens=int(offsets[-1]), num_heads=count, device=device)
        for count in set(head_counts)
    }
    shapes = tuple((len(tokens), tokens.shape[1]) for tokens, _ in places)
    return PackedLayout(
        qkv_format=PACKED_FORMAT, buckets=shapes, cos=cos, sin=sin, heads=heads, spans=spans, blocks=blocks
    )
