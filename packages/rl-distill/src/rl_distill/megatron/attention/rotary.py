"""Rotary embedding: frequencies as in transformers, and the rotation."""

import math
from typing import Any

import torch
from torch import Tensor

from rl_distill.architecture.policy_config import Llama3RopeScaling, PolicyConfig
from rl_distill.megatron.layers.compiled import compiled


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
    return _Rotary.apply(x, cos, sin, is_fused)  # type: ignore[no-any-return, no-untyped-call]


class _Rotary(torch.autograd.Function):
    """Rotation whose gradient is the reverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_fused: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_fused = is_fused
        return _rotate_by(x.detach(), cos, sin, is_fused=is_fused)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_by(grads[0], cos, -sin, is_fused=ctx.is_fused), None, None, None


def _rotate_by(x: Tensor, cos: Tensor, sin: Tensor, *, is_fused: bool) -> Tensor:
    return (compiled(_rotate, x.device.type) if is_fused else _rotate)(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size, half = cos.shape[-1], sin.shape[-1]
    out = x * cos if size == x.shape[-1] else torch.cat((x[..., :size] * cos, x[..., size:]), dim=-1)
    out[..., :half].addcmul_(x[..., half:size], sin, value=-1.0)
    out[..., half:size].addcmul_(x[..., :half], sin)
    return out
