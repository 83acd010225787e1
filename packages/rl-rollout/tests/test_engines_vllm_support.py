"""What vLLM supports, checked against a model's config.json and an engine's options; nothing is loaded."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from rl_core.errors import EngineError
from rl_rollout.engines.vllm import VLLMEngine, VLLMOptions
from rl_rollout.engines.vllm.support import LORA_RANKS, VLLMSupport, lora_problems, target_modules

CPU = VLLMSupport(
    name="vLLM on cpu",
    head_sizes={"float32": [32, 64, 80], "bfloat16": [32, 64, 80], "float16": []},
    block_sizes=[32],
)
GPU = VLLMSupport(name="vLLM on cuda", num_devices=2, head_sizes={"float32": [*range(8, 513, 8)]})
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("support", "config", "options", "problems"),
    [
        (CPU, {}, {}, []),
        (CPU, {"head_dim": 16}, {}, ["head_dim must be one of 32, 64, 80 in float32; config.json has 16."]),
        (CPU, {"hidden_size": 64}, {}, ["head_dim must be one of 32, 64, 80 in float32; config.json has 16."]),
        (CPU, {"hidden_size": 64, "model_type": "qwen3"}, {}, []),
        (CPU, {"head_dim": 16, "kv_lora_rank": 512}, {}, []),
        (CPU, {}, {"dtype": "float16"}, ["dtype must be one of float32, bfloat16; found float16."]),
        (CPU, {}, {"block_size": 48}, ["block_size must be a multiple of 32; found 48."]),
        (CPU, {}, {"block_size": 64}, []),
        (
            CPU,
            {},
            {"tensor_parallel_size": 3},
            [
                "tensor_parallel_size must divide num_attention_heads = 4; found 3.",
                "tensor_parallel_size must divide intermediate_size = 256; found 3.",
                "tensor_parallel_size must divide num_key_value_heads = 2, or be a multiple; found 3.",
            ],
        ),
        (CPU, {}, {"tensor_parallel_size": 4}, []),
        (
            CPU,
            {},
            {"max_num_batched_tokens": 8},
            ["max_num_batched_tokens must be at least max_num_seqs = 512; found 8."],
        ),
        # 2 layers of keys and values, 2 heads of 32 float32, 4 blocks of 32 tokens: 65 tokens need 3, vLLM keeps one.
        (CPU, {}, {"kv_cache_gib": 131072 / 2**30}, []),
        (
            CPU,
            {},
            {"kv_cache_gib": 131071 / 2**30},
            ["kv_cache_gib must be at least 0.00012 for one sequence of 64 tokens; found 0.00012."],
        ),
        (CPU, {"layer_types": ["full_attention", "sliding_attention"]}, {"kv_cache_gib": 1e-9}, []),
        (
            GPU,
            {"head_dim": 20},
            {},
            ["head_dim must be one of 16 or 24, among others, in float32; config.json has 20."],
        ),
        (
            GPU,
            {},
            {"tensor_parallel_size": 4},
            ["tensor_parallel_size must be at most the 2 visible GPUs; found 4."],
        ),
        (
            CPU,
            {"moe_intermediate_size": 49},
            {"tensor_parallel_size": 2},
            ["tensor_parallel_size must divide moe_intermediate_size = 49; found 2."],
        ),
        (
            CPU,
            {"architectures": ["Glm4MoeForCausalLM"], "tie_word_embeddings": True},
            {},
            [
                "tie_word_embeddings must be false for Glm4MoeForCausalLM, whose head it would leave uninitialized; "
                "found true. Save the folder with its own lm_head.weight, or use the transformers engine."
            ],
        ),
        (CPU, {"architectures": ["Glm4MoeForCausalLM"], "tie_word_embeddings": False}, {}, []),
        (VLLMSupport(name="another vLLM"), {"head_dim": 16}, {"block_size": 7, "dtype": "float16"}, []),
    ],
)
def test_what_is_not_supported_is_told(
    support: VLLMSupport, config: dict[str, Any], options: dict[str, Any], problems: list[str]
) -> None:
    assert list(support.problems(CONFIG | config, VLLMOptions(**options), max_model_len=64)) == problems


SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "lm_head.weight": (32, 8),
}
MIXTURE = {
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate.weight": (2, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (16, 8),
}


@pytest.mark.parametrize(
    ("shapes", "options", "targets", "problems"),
    [
        (SHAPES, {}, ("q_proj", "up_proj"), []),
        (SHAPES, {"lora_target_modules": ("up_proj",)}, ("up_proj",), []),
        (MIXTURE, {}, ("o_proj",), []),
        (
            SHAPES,
            {"max_lora_rank": 513},
            ("q_proj", "up_proj"),
            ["max_lora_rank (lora.rank in a run) must be from 0 to 512; found 513."],
        ),
        (
            SHAPES,
            {"lora_target_modules": ("q_proj", "lm_head")},
            ("q_proj", "lm_head"),
            ["lora_target_modules must be among q_proj, up_proj; found lm_head."],
        ),
        (
            MIXTURE,
            {"lora_target_modules": ("up_proj",)},
            ("up_proj",),
            [
                "lora_target_modules must be among o_proj; found up_proj. For a mixture of experts, only attention "
                "adapters are supported."
            ],
        ),
    ],
)
def test_what_adapters_are_served_of_a_model(
    shapes: dict[str, tuple[int, ...]], options: dict[str, Any], targets: tuple[str, ...], problems: list[str]
) -> None:
    asked = VLLMOptions(**{"max_lora_rank": 8, **options})
    assert target_modules(asked, shapes) == targets
    assert list(lora_problems(asked, shapes)) == problems


def test_slots_have_sizes_that_vllm_takes() -> None:
    pytest.importorskip("vllm")
    from vllm.config.lora import MaxLoRARanks  # a slow import

    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_the_installed_vllm_is_asked(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | {"head_dim": 64}))
    VLLMEngine.check(tmp_path, VLLMOptions(max_model_len=64))
    file.write_text(json.dumps(CONFIG | {"head_dim": 17}))
    with pytest.raises(
        EngineError, match=r"vLLM \S+ on \w+ cannot serve .*: head_dim must be one of .*; config.json has 17"
    ):
        VLLMEngine.check(tmp_path, VLLMOptions(max_model_len=64))
