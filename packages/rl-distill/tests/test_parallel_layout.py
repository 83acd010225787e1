"""Sizes that a layout must divide, and options that need certain layouts."""

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from refusals import refusal

from rl_core.errors import SettingsError
from rl_distill.architecture.mixture_config import MixtureConfig
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.parallel_layout import check_layout, check_learner, teacher_layout

DENSE = PolicyConfig(
    architecture="Qwen3ForCausalLM",
    num_layers=6,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    vocab_size=101,
    max_position_embeddings=64,
    norm_eps=1e-6,
    rope_base=1e4,
    rope_scaling=None,
    is_tied=False,
    initializer_range=0.02,
    mixture=None,
)
MIXTURE = MixtureConfig(num_experts=6, top_k=2, norm_topk_prob=True, ffn_hidden_size=32, layers=tuple(range(6)))
SHARED = ParallelOptions(ranks=2, distributed_optimizer=True)
EXPERTS = replace(DENSE, architecture="Qwen3MoeForCausalLM", mixture=MIXTURE)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"ranks": 3, "tensor": 2}, "ranks = 3 must be a multiple of tensor * pipeline * context = 2 * 1 * 1 = 2"),
        ({"ranks": 0}, "ranks of ParallelOptions must be a whole number of at least 1; found 0"),
        ({"ranks": 2, "tensor": 2, "expert_tensor": 0}, "must be a whole number of at least 1 or None"),
        (
            {"ranks": 3, "tensor": 3},
            "tensor = 3 must divide the policy's num_attention_heads = 8; possible values: 1, 2, 4",
        ),
        ({"ranks": 8, "tensor": 8}, "tensor = 8 must divide the policy's num_key_value_heads = 4"),
        ({"ranks": 4, "pipeline": 4}, "pipeline * virtual_pipeline = 4 must divide the policy's num_hidden_layers = 6"),
        ({"ranks": 2, "pipeline": 2, "virtual_pipeline": 2}, "num_hidden_layers = 6"),
        ({"ranks": 3, "context": 3}, "context = 3 must divide the 8 attention heads of a tensor rank"),
        ({"ranks": 2, "expert": 2}, "expert = 2 needs a mixture of experts; this policy is dense"),
        (
            {"ranks": 2, "expert_tensor": 2},
            "expert_tensor = 2 differs from tensor = 1, which needs a mixture of experts",
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(sizes: dict[str, int], said: str):
    with pytest.raises(SettingsError) as refused:
        check_layout(ParallelOptions(**sizes), DENSE)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"ranks": 4, "expert": 4}, "expert = 4 must divide the policy's num_experts = 6; possible values: 1, 2, 3, 6"),
        (
            {"ranks": 3, "expert": 2},
            "ranks = 3 must be a multiple of expert_tensor * expert * pipeline = 1 * 2 * 1",
        ),
        (
            {"ranks": 2, "tensor": 2},
            "sequence must be true for a mixture of experts with tensor = 2, since Megatron requires it; found false",
        ),
        (
            {"ranks": 6, "tensor": 6, "sequence": True, "expert_tensor": 3},
            "expert_tensor = 3 must divide the policy's moe_intermediate_size = 32",
        ),
        ({"ranks": 2, "expert_tensor": 2}, "expert_tensor = 2 must divide tensor = 1"),
        ({"ranks": 4, "tensor": 2, "sequence": True, "expert_tensor": 4}, "expert_tensor = 4 must divide tensor = 2"),
        ({"ranks": 4, "expert": 2, "expert_tensor": 2}, "expert_tensor = 2 must divide tensor = 1"),
    ],
)
def test_a_layout_that_does_not_divide_the_experts_is_refused(sizes: dict[str, int], said: str):
    with pytest.raises(SettingsError) as refused:
        check_layout(ParallelOptions(**sizes), EXPERTS)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelOptions(),
        ParallelOptions(ranks=8, tensor=2, pipeline=2, context=2),
        ParallelOptions(ranks=8, context=8),
        ParallelOptions(ranks=3, pipeline=3, virtual_pipeline=2),
        ParallelOptions(ranks=4, tensor=4, sequence=True, distributed_optimizer=True),
    ],
)
def test_layouts_that_divide_are_taken(layout: ParallelOptions):
    assert refusal(check_layout, layout, DENSE) is None


def test_data_parallelism_takes_what_is_left():
    assert ParallelOptions(ranks=8, tensor=2, context=2).data == 2
    check_layout(ParallelOptions(ranks=6, tensor=2, sequence=True, expert=3, expert_tensor=1), EXPERTS)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(SettingsError) as refused:
        check_layout(ParallelOptions(ranks=8, tensor=8, expert=4), EXPERTS)
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["tensor", "expert", "ranks", "sequence"]
    with pytest.raises(SettingsError) as refused:
        check_layout(ParallelOptions(ranks=2, virtual_pipeline=2, expert_tensor=2), replace(EXPERTS, model_json="{}"))
    found = [line.split(".")[0] for line in str(refused.value).splitlines()]
    divided = "needs layers that ranks can divide; Qwen3MoeForCausalLM is computed by transformers' class"
    assert found == [
        "virtual_pipeline = 2 needs pipeline > 1; found 1",
        f"virtual_pipeline = 2 {divided}",
        f"expert_tensor = 2 {divided}",
    ]


@pytest.mark.parametrize(("ranks", "expert"), [(1, 1), (2, 2), (4, 2)])
def test_a_teachers_ranks_share_whole_experts_as_far_as_they_go(ranks: int, expert: int):
    layout = teacher_layout(ranks, EXPERTS)
    check_layout(layout, EXPERTS)
    assert (layout.tensor, layout.expert, layout.expert * (layout.expert_tensor or 1)) == (ranks, expert, ranks)
    assert teacher_layout(ranks, DENSE) == ParallelOptions(ranks=ranks, tensor=ranks)


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        (
            {"overlap_grad_reduce": True, "overlap_param_gather": True},
            DENSE,
            "overlap_param_gather needs parallel.distributed_optimizer = true",
        ),
        (
            {"recompute": "selective", "recompute_modules": ("layernorm", "moe")},
            DENSE,
            'recompute_modules has "moe", but no layer of this policy has a mixture of experts',
        ),
        (
            {"recompute": "selective", "recompute_modules": ("mlp",)},
            EXPERTS,
            'recompute_modules has "mlp", but no layer of this policy has a dense MLP',
        ),
    ],
)
def test_options_that_the_layout_or_the_policy_has_no_use_for_are_refused(
    options: dict[str, Any], config: PolicyConfig, said: str
):
    with pytest.raises(SettingsError) as refused:
        check_learner(LearnerOptions(**options), ParallelOptions(ranks=2), config)
    assert str(refused.value).startswith(said)
    check_learner(LearnerOptions(**options | {"recompute": "none"}), SHARED, config)


def test_layers_of_both_kinds_can_be_computed_again():
    some = replace(EXPERTS, mixture=replace(MIXTURE, layers=(1, 2)))
    modules = ("core_attn", "layernorm", "mlp", "moe")
    options = LearnerOptions(recompute="selective", recompute_modules=modules)
    assert refusal(check_learner, options, SHARED, some) is None


@pytest.mark.parametrize("groups", [4, 6, 12])
def test_context_ranks_share_heads_and_either_share_groups_or_repeat_them(groups: int):
    config = replace(DENSE, num_heads=12, num_key_value_heads=groups)
    for tensor, context in itertools.product((1, 2), range(1, 14)):
        heads, local = 12 // tensor, groups // tensor
        possible = [size for size in range(1, heads + 1) if heads % size == 0 and 0 in (local % size, size % local)]
        layout = ParallelOptions(ranks=tensor * context, tensor=tensor, context=context)
        said = refusal(check_layout, layout, config)
        if context in possible:
            assert said is None
        else:
            assert f"the {heads} attention heads" in str(said)
            assert f"its {local} key-value heads" in str(said)
            assert f"one of {possible}." in str(said)


@pytest.mark.parametrize(
    ("layout", "lora", "model_json", "said"),
    [
        ({"distributed_optimizer": True}, 0, "", ["parallel.distributed_optimizer = true divides"]),
        ({"shard_weights": True}, 0, "", ["parallel.shard_weights = true divides"]),
        ({}, 2, "", ["trains no adapters; found lora.rank = 2"]),
        ({}, 0, "{}", ["is computed by transformers' class"]),
        ({}, 0, "", []),
    ],
)
def test_muon_trains_whole_matrices_of_our_layers(layout: dict[str, bool], lora: int, model_json: str, said: list[str]):
    config = replace(DENSE, model_json=model_json)
    check = partial(
        check_learner, parallel=ParallelOptions(ranks=2, **layout), config=config, lora=LoraOptions(rank=lora)
    )
    lines = str(refusal(check, LearnerOptions(algorithm="muon")) or "").splitlines()
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert line.startswith('algorithm = "muon"')
        assert part in line
    assert refusal(check, LearnerOptions()) is None


def test_a_vision_tower_is_trained_where_there_is_one_and_without_adapters():
    vision = LearnerOptions(trains_vision=True)
    lines = str(refusal(check_learner, vision, ParallelOptions(), DENSE, lora=LoraOptions(rank=2))).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("trains_vision = true needs a policy with a vision tower; Qwen3ForCausalLM has none")
    assert lines[1].startswith("trains_vision = true trains no adapter; found lora.rank = 2")


@pytest.mark.parametrize("kernels", ["plain", "fused", "transformer_engine"])
@pytest.mark.parametrize("rank", [0, 2])
def test_transformer_engine_computes_no_adapters(kernels: str, rank: int):
    said = refusal(
        check_learner, LearnerOptions(kernels=kernels), ParallelOptions(), DENSE, lora=LoraOptions(rank=rank)
    )
    is_refused = kernels == "transformer_engine" and rank == 2
    assert ("does not support adapters; found lora.rank = 2" in str(said)) if is_refused else said is None


def test_only_transformers_models_divide_their_weights():
    with pytest.raises(SettingsError, match=r"shard_weights = true needs a model that transformers' class computes"):
        check_layout(ParallelOptions(ranks=2, shard_weights=True), DENSE)


def test_a_policy_with_images_is_not_advised_to_divide_its_weights():
    images = json.dumps(
        {"model_type": "llava", "image_token_index": 7, "vision_config": {"model_type": "clip_vision_model"}}
    )
    for model_json, has_advice in (("{}", True), (images, False)):
        with pytest.raises(SettingsError) as refused:
            check_layout(ParallelOptions(ranks=2, tensor=2), replace(DENSE, model_json=model_json))
        assert ("shard_weights" in str(refused.value)) == has_advice
    with pytest.raises(SettingsError, match="shard_weights = true does not divide Qwen3ForCausalLM"):
        check_layout(ParallelOptions(ranks=2, shard_weights=True), replace(DENSE, model_json=images))


def test_what_cannot_be_done_with_divided_weights_is_refused_by_name():
    config, layout = replace(DENSE, model_json="{}"), ParallelOptions(ranks=2, shard_weights=True)
    check_layout(layout, config)
    with pytest.raises(SettingsError) as refused:
        check_layout(replace(layout, distributed_optimizer=True, tensor=2), config, lora=LoraOptions(rank=2))
    tensor, optimizer, adapter = str(refused.value).splitlines()
    assert tensor.startswith("tensor = 2 needs layers that ranks can divide")
    assert optimizer.endswith("Set distributed_optimizer = false.")
    assert adapter.startswith("shard_weights = true cannot train adapters; found lora.rank = 2.")
    with pytest.raises(SettingsError) as refused:
        check_learner(LearnerOptions(overlap_grad_reduce=True, overlap_param_gather=True), layout, config)
    reduces, gathers = str(refused.value).splitlines()
    assert reduces.startswith("overlap_grad_reduce = true has no effect with parallel.shard_weights = true")
    assert gathers.startswith("overlap_param_gather = true has no effect with parallel.shard_weights = true")
