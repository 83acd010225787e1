"""Blocks of Hugging Face tensors: every layout covers them exactly, and round trips are exact to the bit."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_core.errors import ShapeError
from rl_distill.architecture.mixture_config import MixtureConfig, SigmoidRouting
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.megatron.convert import Shard, TensorBlock, blocks_of, padded_vocab_size
from rl_distill.options import ParallelOptions

Tensors = dict[str, torch.Tensor]

MIXTURE = MixtureConfig(num_experts=4, top_k=2, norm_topk_prob=True, ffn_hidden_size=8, layers=(1, 2, 3))
"""A policy's first layer is dense."""
GLM = replace(MIXTURE, shared_ffn_hidden_size=16, sigmoid=SigmoidRouting(num_groups=2, top_groups=1, scaling=2.0))


def config_of(**changes: Any) -> PolicyConfig:
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "num_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "vocab_size": 10,
        "max_position_embeddings": 16,
        "norm_eps": 1e-6,
        "rope_base": 1e4,
        "is_tied": False,
        "initializer_range": 0.02,
    }
    return PolicyConfig(**{**fields, **changes})


def mixture_config(**changes: Any) -> PolicyConfig:
    return config_of(architecture="Qwen3MoeForCausalLM", mixture=MIXTURE, **changes)


def glm_config(**changes: Any) -> PolicyConfig:
    return config_of(architecture="Glm4MoeForCausalLM", mixture=GLM, attention_bias=True, **changes)


def whole_policy(config: PolicyConfig) -> Shard:
    return Shard(layers=range(config.num_layers))


def tensors_of(config: PolicyConfig) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(config).items()}


def megatron_state(config: PolicyConfig, shard: Shard) -> Tensors:
    """Return the tensors of a chunk in megatron's names and shapes, filled with NaN."""
    hidden, tensor = config.hidden_size, shard.tensor_size
    rows = padded_vocab_size(config, tensor) // tensor
    qkv = (config.num_heads + 2 * config.num_key_value_heads) * config.head_dim // tensor
    shapes: dict[str, tuple[int, ...]] = {}
    if shard.has_embedding:
        shapes["embedding.word_embeddings.weight"] = (rows, hidden)
    for local, index in enumerate(shard.layers):
        layer = f"decoder.layers.{local}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attention.linear_qkv.weight"] = (qkv, hidden)
        if config.has_qkv_bias:
            shapes[layer + "self_attention.linear_qkv.bias"] = (qkv,)
        if config.has_qk_norm:
            shapes[layer + "self_attention.q_layernorm.weight"] = (config.head_dim,)
            shapes[layer + "self_attention.k_layernorm.weight"] = (config.head_dim,)
        shapes[layer + "self_attention.linear_proj.weight"] = (hidden, config.num_heads * config.head_dim // tensor)
        if not config.is_mixture(index):
            shapes[layer + "mlp.linear_fc1.weight"] = (2 * config.ffn_hidden_size // tensor, hidden)
            shapes[layer + "mlp.linear_fc2.weight"] = (hidden, config.ffn_hidden_size // tensor)
            continue
        shapes[layer + "mlp.router.weight"] = (config.num_experts, hidden)
        if config.mixture == GLM:
            shapes[layer + "mlp.router.expert_bias"] = (config.num_experts,)
            shapes[layer + "mlp.shared_experts.linear_fc1.weight"] = (2 * GLM.shared_ffn_hidden_size // tensor, hidden)
            shapes[layer + "mlp.shared_experts.linear_fc2.weight"] = (hidden, GLM.shared_ffn_hidden_size // tensor)
        ffn = MIXTURE.ffn_hidden_size // shard.expert_tensor_size
        num_experts = config.num_experts // shard.expert_size
        shapes[layer + "mlp.experts.linear_fc1"] = (num_experts, 2 * ffn, hidden)
        shapes[layer + "mlp.experts.linear_fc2"] = (num_experts, hidden, ffn)
    if shard.has_head:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        if not (config.is_tied and shard.has_embedding):
            shapes["output_layer.weight"] = (rows, hidden)
    return {name: torch.full(shape, math.nan) for name, shape in shapes.items()}


def chunks_of(config: PolicyConfig, parallel: ParallelOptions) -> Iterator[tuple[Shard, bool, bool]]:
    """Yield all chunks of all ranks, and whether the rank is the first data-parallel and expert-data-parallel copy."""
    stages, virtual = parallel.pipeline, parallel.virtual_pipeline
    expert_tensor = parallel.expert_tensor or parallel.tensor
    size = config.num_layers // (stages * virtual)
    for rank in range(parallel.ranks // stages):  # megatron's order of ranks within a stage
        for stage in range(stages):
            for chunk in range(virtual):
                number = chunk * stages + stage
                shard = Shard(
                    layers=range(number * size, (number + 1) * size),
                    has_embedding=number == 0,
                    has_head=number == stages * virtual - 1,
                    tensor_rank=rank % parallel.tensor,
                    tensor_size=parallel.tensor,
                    expert_rank=rank // expert_tensor % parallel.expert,
                    expert_size=parallel.expert,
                    expert_tensor_rank=rank % expert_tensor,
                    expert_tensor_size=expert_tensor,
                )
                yield shard, rank < parallel.tensor, rank < expert_tensor * parallel.expert


def rectangle(block: TensorBlock) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(block.offsets, block.sizes, strict=True))


def parallel_of(**sizes: int) -> ParallelOptions:
    """Return a layout; the default number of ranks is the minimum."""
    dense = sizes.get("tensor", 1)
    experts = sizes.get("expert", 1) * sizes.get("expert_tensor", dense)
    ranks = max(dense, experts) * sizes.get("pipeline", 1)
    return ParallelOptions(ranks=sizes.pop("ranks", ranks), **sizes)


DENSE_LAYOUTS = [
    parallel_of(),
    parallel_of(tensor=2),
    parallel_of(tensor=4),
    parallel_of(pipeline=2),
    parallel_of(pipeline=4),
    parallel_of(pipeline=2, virtual_pipeline=2),
    parallel_of(tensor=2, pipeline=2, virtual_pipeline=2, ranks=8),
    parallel_of(tensor=4, pipeline=2),
]
MIXTURE_LAYOUTS = [
    parallel_of(),
    parallel_of(tensor=2),
    parallel_of(expert=2),
    parallel_of(expert=4),
    parallel_of(tensor=2, expert=2),
    parallel_of(tensor=2, expert=2, expert_tensor=1),
    parallel_of(tensor=2, expert=4, expert_tensor=1),
    parallel_of(tensor=4, expert_tensor=1, expert=2),
    parallel_of(expert=2, expert_tensor=2),
    parallel_of(tensor=2, pipeline=2, expert=2, expert_tensor=1, ranks=8),
    parallel_of(pipeline=2, virtual_pipeline=2, expert=2),
]
CASES = [
    *[(config_of(is_tied=tied), layout) for tied in (True, False) for layout in DENSE_LAYOUTS],
    *[(config_of(architecture="Qwen2ForCausalLM", is_tied=True), layout) for layout in DENSE_LAYOUTS],
    *[(config_of(architecture="LlamaForCausalLM", vocab_size=5), layout) for layout in DENSE_LAYOUTS],
    *[(mixture_config(), layout) for layout in MIXTURE_LAYOUTS],
    *[(glm_config(), layout) for layout in MIXTURE_LAYOUTS],
]


@pytest.mark.parametrize(("config", "parallel"), CASES)
def test_primary_blocks_cover_every_tensor_exactly_once(config: PolicyConfig, parallel: ParallelOptions):
    shapes = tensor_shapes(config)
    counts = {name: torch.zeros(shape) for name, shape in shapes.items()}

    for shard, is_first, is_first_expert in chunks_of(config, parallel):
        for block in blocks_of(megatron_state(config, shard), config, shard):
            assert block.shape == shapes[block.name]
            if block.is_primary and (is_first_expert if block.is_expert else is_first):
                counts[block.name][rectangle(block)] += 1

    assert all(bool((count == 1).all()) for count in counts.values())


@pytest.mark.parametrize(("config", "parallel"), CASES)
def test_a_round_trip_is_exact_to_the_bit(config: PolicyConfig, parallel: ParallelOptions):
    tensors = tensors_of(config)
    found = {name: torch.full(tensor.shape, math.nan) for name, tensor in tensors.items()}

    for shard, is_first, is_first_expert in chunks_of(config, parallel):
        state = megatron_state(config, shard)
        for block in blocks_of(state, config, shard):
            block.write(tensors[block.name][rectangle(block)])
        assert not any(tensor.isnan().any() for tensor in state.values())  # padding is filled as well
        for block in blocks_of(state, config, shard):
            if block.is_primary and (is_first_expert if block.is_expert else is_first):
                value = block.read()
                assert value.is_contiguous()
                assert tuple(value.shape) == block.sizes
                found[block.name][rectangle(block)] = value

    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def filled(config: PolicyConfig, shard: Shard, tensors: Tensors) -> Tensors:
    state = megatron_state(config, shard)
    for block in blocks_of(state, config, shard):
        block.write(tensors[block.name][rectangle(block)])
    return state


def test_qkv_is_fused_group_by_group():
    config = config_of(
        architecture="Qwen2ForCausalLM", num_layers=1, hidden_size=1, head_dim=1, num_heads=4, num_key_value_heads=2
    )
    tensors = tensors_of(config)
    prefix = "model.layers.0.self_attn."
    values = {"q": [1.0, 2.0, 3.0, 4.0], "k": [10.0, 30.0], "v": [100.0, 300.0]}
    for letter, rows in values.items():
        tensors[f"{prefix}{letter}_proj.weight"] = torch.tensor(rows)[:, None]
        tensors[f"{prefix}{letter}_proj.bias"] = -torch.tensor(rows)

    state = filled(config, whole_policy(config), tensors)
    second = filled(config, Shard(layers=range(1), tensor_rank=1, tensor_size=2), tensors)

    attention = "decoder.layers.0.self_attention.linear_qkv."
    assert state[attention + "weight"].flatten().tolist() == [1, 2, 10, 100, 3, 4, 30, 300]
    assert state[attention + "bias"].tolist() == [-1, -2, -10, -100, -3, -4, -30, -300]
    assert second[attention + "weight"].flatten().tolist() == [3, 4, 30, 300]


def test_fc1_of_a_rank_is_its_gate_then_its_up():
    config = config_of(num_layers=1, hidden_size=1, ffn_hidden_size=4)
    tensors = tensors_of(config)
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[5.0], [6.0], [7.0], [8.0]])

    second = filled(config, Shard(layers=range(1), tensor_rank=1, tensor_size=2), tensors)

    assert second["decoder.layers.0.mlp.linear_fc1.weight"].flatten().tolist() == [3, 4, 7, 8]


def test_experts_are_numbered_over_the_ranks():
    config = mixture_config()
    shard = Shard(layers=range(2, 4), expert_rank=1, expert_size=2, has_embedding=False)

    blocks = blocks_of(megatron_state(config, shard), config, shard)

    names = {block.name for block in blocks if block.is_expert and "down" in block.name}
    assert names == {f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight" for layer in (2, 3) for e in (2, 3)}


def test_a_tied_head_on_a_stage_of_its_own_is_a_copy_of_the_embedding():
    config = config_of(is_tied=True)
    tensors = tensors_of(config)
    shard = Shard(layers=range(2, 4), has_embedding=False)

    state = filled(config, shard, tensors)
    (copy,) = [b for b in blocks_of(state, config, shard) if b.name == "model.embed_tokens.weight"]

    assert torch.equal(state["output_layer.weight"], tensors["model.embed_tokens.weight"])
    assert not copy.is_primary


def test_rows_that_no_token_has_are_zeros():
    config = config_of(vocab_size=5)
    tensors = tensors_of(config)
    embedding = tensors["model.embed_tokens.weight"]

    ranks = [filled(config, Shard(layers=range(4), tensor_rank=r, tensor_size=4), tensors) for r in range(4)]

    parts = [state["embedding.word_embeddings.weight"] for state in ranks]
    assert padded_vocab_size(config, 4) == 8
    assert torch.equal(torch.cat(parts)[:5], embedding)
    assert not torch.cat(parts)[5:].any()


def test_blocks_work_on_whatever_has_the_shapes_of_parameters():
    config = config_of()
    moments = {name: tensor.double().zero_() for name, tensor in megatron_state(config, whole_policy(config)).items()}

    for block in blocks_of(moments, config, whole_policy(config)):
        block.write(torch.ones(block.sizes))

    assert moments
    assert all(bool((tensor == 1).all()) for tensor in moments.values())


def test_unknown_names_and_wrong_shapes_are_refused():
    config = config_of()
    with pytest.raises(ShapeError, match=r"'mlp\.linear_fc3\.weight'"):
        blocks_of({"decoder.layers.0.mlp.linear_fc3.weight": torch.zeros(1)}, config, whole_policy(config))
    state = megatron_state(config, whole_policy(config))
    block = blocks_of(state, config, whole_policy(config))[0]
    with pytest.raises(ShapeError, match=r"must have shape \[10, 8\]; found \[10, 9\]"):
        block.write(torch.zeros(10, 9))
