"""Frequencies of the rotary embedding, as transformers computes them."""

import math

import torch
from torch import Tensor

from rl_distill.architecture.policy_config import Llama3RopeScaling, PolicyConfig


def rotary_frequencies(config: PolicyConfig) -> Tensor:
    """Angle of one position step, for each pair of a head's rotated channels.

    Args:
        config: The policy, whose base and scaling of positions count.

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
    """Long waves are stretched by the factor, short ones stay, those between are mixed."""
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > length / low, wavelengths < length / high
    stretched = torch.where(is_long, frequencies / scaling.factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    mixed = (1 - share) * stretched / scaling.factor + share * stretched
    return torch.where(~is_short & ~is_long, mixed, stretched)
