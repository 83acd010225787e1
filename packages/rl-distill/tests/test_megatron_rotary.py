"""Rotary frequencies and tables, compared with those of transformers."""

import math
from typing import Any

import pytest
import torch
from rounding import rounding_bound
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_distill.architecture.policy_config import parse_policy_config
from rl_distill.megatron.attention.layout import rotary_frequencies, rotary_tables

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


def config_of(rope: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters=rope,
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_and_tables_are_those_of_transformers(rope: dict[str, Any], head_dim: int):
    config = config_of(rope, head_dim)
    reference = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 7, 8191, 100_000])

    frequencies = rotary_frequencies(parse_policy_config(config.to_dict()))
    cos, sin = rotary_tables(positions, frequencies=frequencies)

    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=rounding_bound(1.0, roundings=8), atol=0)
    expected_cos, expected_sin = reference(torch.zeros(1), positions[None])
    # A rounded angle is off by a share of its size; a cosine or sine is off by as much, and rounds itself.
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    bounds = rounding_bound(angles, roundings=8) + rounding_bound(1.0, roundings=8)
    assert ((cos[:, 0, 0] - expected_cos[0]).abs() <= bounds).all()
    assert ((torch.cat((sin, sin), -1)[:, 0, 0] - expected_sin[0]).abs() <= bounds).all()


def test_llama3_stretches_long_waves_and_leaves_short_ones():
    rope = {**ROPES[2], "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 12}

    frequencies = rotary_frequencies(parse_policy_config(config_of(rope, 4).to_dict()))

    # Wavelengths 2 pi and 20 pi; for length 12, the first is between 3 and 12, and the second is longer.
    share = (12 / (2 * math.pi) - 1) / 3
    torch.testing.assert_close(frequencies, torch.tensor([(1 - share) / 2 + share, 0.1 / 2]))
