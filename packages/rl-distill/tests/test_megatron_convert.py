"""Hugging Face names to megatron's and back, exact to the bit."""

from typing import Any

import pytest
import torch

from rl_core.errors import ShapeError
from rl_distill.hf_folder import tensor_shapes
from rl_distill.megatron.convert import Shard, from_megatron, to_megatron, whole_policy
from rl_distill.policy_config import PolicyConfig


def config_of(**changes: Any) -> PolicyConfig:
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 10,
        "max_position_embeddings": 16,
        "norm_eps": 1e-6,
        "rope_base": 1e4,
        "is_tied": False,
        "initializer_range": 0.02,
    }
    return PolicyConfig(**{**fields, **changes})


def tensors_of(config: PolicyConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(config).items()}


def test_qkv_is_fused_group_by_group():
    config = config_of(num_layers=1, hidden_size=1, head_dim=1)
    tensors = tensors_of(config)
    prefix = "model.layers.0.self_attn."
    tensors[prefix + "q_proj.weight"] = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    tensors[prefix + "k_proj.weight"] = torch.tensor([[10.0], [30.0]])
    tensors[prefix + "v_proj.weight"] = torch.tensor([[100.0], [300.0]])

    fused = to_megatron(tensors, config, whole_policy(config))["decoder.layers.0.self_attention.linear_qkv.weight"]

    assert fused.flatten().tolist() == [1, 2, 10, 100, 3, 4, 30, 300]


def test_fc1_of_a_rank_is_its_gate_then_its_up():
    config = config_of(num_layers=1, hidden_size=1, ffn_hidden_size=4)
    tensors = tensors_of(config)
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[5.0], [6.0], [7.0], [8.0]])

    second = to_megatron(tensors, config, Shard(layers=range(1), tensor_rank=1, tensor_size=2))

    assert second["decoder.layers.0.mlp.linear_fc1.weight"].flatten().tolist() == [3, 4, 7, 8]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_round_trip_is_exact_for_every_layout(is_tied: bool, tensor_size: int, stages: int):
    config = config_of(is_tied=is_tied)
    tensors = tensors_of(config)
    found: dict[str, torch.Tensor] = {}
    per_stage = config.num_layers // stages
    for stage in range(stages):
        shards = [
            Shard(
                layers=range(stage * per_stage, (stage + 1) * per_stage),
                has_embedding=stage == 0,
                has_head=stage == stages - 1,
                tensor_rank=rank,
                tensor_size=tensor_size,
            )
            for rank in range(tensor_size)
        ]
        states = [to_megatron(tensors, config, shard) for shard in shards]
        found.update(from_megatron(states, config, shards[0]))

    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tied_head_is_the_embedding_on_the_last_stage():
    config = config_of(is_tied=True)
    tensors = tensors_of(config)

    state = to_megatron(tensors, config, Shard(layers=range(2, 4), has_embedding=False))

    assert torch.equal(state["output_layer.weight"], tensors["model.embed_tokens.weight"])


def test_key_heads_that_do_not_divide_are_refused():
    config = config_of()

    with pytest.raises(ShapeError, match="num_key_value_heads = 2"):
        to_megatron(tensors_of(config), config, Shard(layers=range(4), tensor_size=4))
