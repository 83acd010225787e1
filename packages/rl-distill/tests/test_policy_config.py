"""Reading config.json in the formats of both versions of transformers."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core import Batch, Ragged
from rl_core.errors import DataError, SettingsError, ShapeError
from rl_distill.architecture.mixture_config import MixtureConfig, SigmoidRouting
from rl_distill.architecture.policy_config import (
    SUPPORTED_ARCHITECTURES,
    LinearRopeScaling,
    Llama3RopeScaling,
    parse_policy_config,
)
from rl_distill.architecture.tensor_shapes import tensor_shapes
from rl_distill.architecture.transformers_model import build_model, canonical_json, read_config
from rl_distill.stepping import check_tokens

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXTURE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


GLM = {
    **DENSE,
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 16,
    "attention_bias": True,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
}
"""Like GLM-4.5's, which has a single group of experts."""


ROPES = ("rope_parameters", "rope_scaling")


def llama(**changes: Any) -> dict[str, Any]:
    return {**DENSE, "architectures": ["LlamaForCausalLM"], **changes}


def test_an_architecture_without_layers_of_ours_is_refused_if_they_must_compute_it():
    with pytest.raises(SettingsError) as caught:
        parse_policy_config({**DENSE, "architectures": ["Gemma3ForCausalLM"]}, backend="megatron")

    assert str(caught.value) == (
        "architecture Gemma3ForCausalLM is not computed by our layers, which have Qwen3ForCausalLM, "
        'Qwen3MoeForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, Glm4MoeForCausalLM. Set policy.backend = "auto".'
    )


@pytest.mark.parametrize("architectures", [["MyOwnForCausalLM"], [], None])
@pytest.mark.parametrize("model_type", ["my_own", 7])
def test_a_model_that_transformers_does_not_know_is_refused(architectures: Any, model_type: Any):
    with pytest.raises(SettingsError, match=r"model_type must be one of .*architectures.*own code is not run"):
        parse_policy_config({**DENSE, "architectures": architectures, "model_type": model_type})


def test_a_model_that_names_neither_class_nor_type_is_refused():
    with pytest.raises(DataError, match=r"config\.json must have a model_type, .*; found none"):
        parse_policy_config({**DENSE, "architectures": None, "model_type": None})


def test_options_that_our_layers_lack_are_left_to_the_class():
    config = {**llama(), "model_type": "llama"}

    assert not parse_policy_config(config).model_json
    for change in (
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    ):
        found = parse_policy_config({**config, **change})
        assert found.model_json
        assert (found.num_layers, found.hidden_size, found.vocab_size) == (
            config["num_hidden_layers"],
            config["hidden_size"],
            config["vocab_size"],
        )
        with pytest.raises(SettingsError, match="|".join(change)):
            parse_policy_config({**config, **change}, backend="megatron")
    assert parse_policy_config(config, backend="transformers").model_json


@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    zip(SUPPORTED_ARCHITECTURES, (128, 8, 8, 8, 8), strict=True),
)
def test_a_missing_head_dim_is_what_transformers_takes(architecture: str, head_dim: int):
    config = {**MIXTURE, "architectures": [architecture]}

    assert parse_policy_config(config).head_dim == head_dim
    assert parse_policy_config({**config, "head_dim": 16}).head_dim == 16


def test_families_differ_in_biases_norms_and_experts():
    found = [parse_policy_config({**MIXTURE, "architectures": [name]}) for name in SUPPORTED_ARCHITECTURES]

    assert [config.has_qk_norm for config in found] == [True, True, False, False, False]
    assert [config.has_qkv_bias for config in found] == [False, False, True, False, False]
    assert [config.num_experts for config in found] == [0, 8, 0, 0, 8]


def test_every_head_has_keys_of_its_own_where_none_are_said():
    config = {name: value for name, value in llama().items() if name != "num_key_value_heads"}

    assert parse_policy_config(config).num_key_value_heads == 4


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 500000},
    ],
)
def test_rope_scaling_is_read_in_both_dialects(dialect: dict[str, Any]):
    config = parse_policy_config(llama(**dialect))

    assert config.rope_base == 5e5
    assert config.rope_scaling == Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_other_rope_scalings():
    linear = parse_policy_config(llama(rope_scaling={"type": "linear", "factor": 2}, rope_theta=1e4))

    assert linear.rope_scaling == LinearRopeScaling(factor=2.0)
    assert parse_policy_config(llama(rope_scaling=None, rope_theta=5e5)).rope_scaling is None
    for kind in ("yarn", "dynamic", "longrope"):
        with pytest.raises(SettingsError, match=f"rope_type '{kind}' is not supported.*default, linear, llama3"):
            parse_policy_config(llama(rope_parameters={"rope_type": kind, "factor": 4.0}), backend="megatron")
    with pytest.raises(DataError, match="no field 'low_freq_factor'"):
        parse_policy_config(llama(rope_parameters={"rope_type": "llama3", "factor": 4.0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({name: value}, f"one object .* as {name}") for name in ROPES for value in (7, "yarn", [], [{}], 0, False)],
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "for all layers; found"),
        ({"rope_theta": 0}, "rope_theta above 0; found 0"),
        ({"rope_theta": True}, "rope_theta above 0; found True"),
        ({"rope_theta": -1e4}, "rope_theta above 0"),
        ({"rope_parameters": {"rope_theta": 0.0}, "rope_theta": 5e5}, "rope_theta above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor above 0"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0}}, "high_freq_factor above 0"),
        ({"head_dim": 0}, "head_dim >= 1; found 0"),
    ],
)
def test_a_rope_that_means_nothing_is_no_default(changes: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        parse_policy_config(llama(**changes))


def test_a_rope_without_values_has_defaults():
    for rope in ({}, None):
        assert parse_policy_config(llama(rope_parameters=rope, rope_scaling=rope, rope_theta=None)).rope_base == 1e4
    with pytest.raises(SettingsError, match="rope_type '' is not supported"):
        parse_policy_config(llama(rope_parameters={"rope_type": ""}), backend="megatron")


def test_layers_of_experts_are_those_that_transformers_makes():
    def layers(**changes: Any) -> tuple[int, ...] | None:
        mixture = parse_policy_config({**MIXTURE, **changes}).mixture
        return mixture and mixture.layers

    assert layers() == (0, 1, 2, 3)
    assert layers(mlp_only_layers=[0, 2]) == (1, 3)
    assert layers(decoder_sparse_step=2) == (1, 3)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == (3,)
    assert layers(mlp_only_layers=[0, 1, 2, 3]) is None
    assert layers(num_experts=0) is None


def test_experts_are_counted_in_both_dialects():
    config = {name: value for name, value in MIXTURE.items() if name != "num_experts"}

    found = parse_policy_config({**config, "num_local_experts": 8, "norm_topk_prob": True})

    assert found.mixture == MixtureConfig(
        num_experts=8, top_k=2, norm_topk_prob=True, ffn_hidden_size=16, layers=(0, 1, 2, 3)
    )
    assert found.is_mixture(3)
    assert not parse_policy_config(DENSE).is_mixture(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be 'full_attention'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob must be False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        (
            {"output_router_logits": True},
            "router_aux_loss_coef with output_router_logits.*output_router_logits to false",
        ),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.01}, r"router_aux_loss_coef.*Set it to 0"),
        ({"router_z_loss_coef": 0.1}, r"\(router_z_loss_coef\).*Set it to 0"),
        ({"moe_router_bias_update_rate": 1e-3}, r"\(moe_router_bias_update_rate\).*Set it to 0"),
    ],
)
def test_what_the_learners_do_not_do_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        parse_policy_config({**MIXTURE, **changes}, backend="megatron")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers >= 1; found 0"),
        ({"vocab_size": "many"}, "field of the wrong type.*many"),
        ({"hidden_size": None}, "field of the wrong type"),
        ({"num_key_value_heads": 3}, "divisible by num_key_value_heads; found 4 and 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be <= num_experts = 8; found 9"),
    ],
)
def test_impossible_fields_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        parse_policy_config({**MIXTURE, **changes})


def test_losses_that_are_not_asked_for_are_not_refused():
    for changes in (
        {"router_aux_loss_coef": 0.001, "output_router_logits": False},
        {"router_aux_loss_coef": 0.0, "output_router_logits": True, "router_z_loss_coef": 0},
    ):
        assert parse_policy_config({**MIXTURE, **changes}) == parse_policy_config(MIXTURE)
    assert parse_policy_config({**GLM, "output_router_logits": True}) == parse_policy_config(GLM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group must divide n_routed_experts = 8"),
        ({"n_group": 8}, "into groups of at least 2; found 8"),
        ({"topk_group": 5}, "topk_group must be <= n_group = 4; found 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be <= the experts of topk_group groups.* = 4; found 5"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace >= 0; found -1"),
        ({"n_shared_experts": 0}, "n_shared_experts >= 1; found 0"),
        ({"partial_rotary_factor": 0.35}, "an even number of the 20 channels of a head; found 0.35"),
        ({"partial_rotary_factor": 1.5}, "an even number of the 20 channels"),
    ],
)
def test_impossible_fields_of_glm_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        parse_policy_config({**GLM, "head_dim": 20, "partial_rotary_factor": 0.5, **changes})


@pytest.mark.parametrize(
    ("dialect", "rotary_dim"),
    [
        ({"partial_rotary_factor": 0.25, "rope_theta": 1e4, "rope_scaling": None}, 4),
        ({"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4, "rope_type": "default"}}, 4),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}, 4),
        ({"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.25}, 4),
        ({}, 8),
        ({"partial_rotary_factor": 1.0}, 0),
    ],
)
def test_a_part_of_each_head_is_rotated_in_both_dialects(dialect: dict[str, Any], rotary_dim: int):
    assert parse_policy_config({**GLM, **dialect}).rotary_dim == rotary_dim


def test_glm_is_read():
    found = parse_policy_config(GLM)

    assert found.mixture == MixtureConfig(
        num_experts=8,
        top_k=2,
        norm_topk_prob=True,
        ffn_hidden_size=16,
        layers=(1, 2, 3),
        shared_ffn_hidden_size=32,
        sigmoid=SigmoidRouting(num_groups=4, top_groups=2, scaling=2.5),
    )
    assert (found.has_qkv_bias, found.has_qk_norm) == (True, False)
    assert parse_policy_config({**GLM, "use_qk_norm": True}).has_qk_norm
    assert parse_policy_config({**GLM, "first_k_dense_replace": 0}).mixture.layers == (0, 1, 2, 3)
    assert parse_policy_config({**GLM, "first_k_dense_replace": 4}).mixture is None
    few = {name: value for name, value in GLM.items() if name not in ("n_group", "topk_group", "n_shared_experts")}
    assert parse_policy_config(few).mixture.sigmoid == SigmoidRouting(num_groups=1, top_groups=1, scaling=2.5)
    assert parse_policy_config(few).mixture.shared_ffn_hidden_size == 16


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "rms_norm_eps", "moe_intermediate_size"])
def test_missing_fields_are_named(name: str):
    with pytest.raises(DataError, match=f"no field '{name}', which Qwen3MoeForCausalLM requires"):
        parse_policy_config({key: value for key, value in MIXTURE.items() if key != name})


def test_the_digest_tells_policies_apart_that_weights_must_agree_with():
    digests = {
        parse_policy_config(config).digest
        for config in (
            DENSE,
            {**DENSE, "architectures": ["Qwen2ForCausalLM"], "head_dim": 128},
            {**DENSE, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            MIXTURE,
            {**MIXTURE, "norm_topk_prob": True},
            {**MIXTURE, "mlp_only_layers": [1]},
            GLM,
            {**GLM, "attention_bias": False},
            {**GLM, "use_qk_norm": True},
            {**GLM, "partial_rotary_factor": 0.25},
            {**GLM, "n_shared_experts": 1},
            {**GLM, "n_group": 2},
            {**GLM, "routed_scaling_factor": 1.0},
        )
    }

    assert len(digests) == 13
    assert parse_policy_config({**DENSE, "initializer_range": 1.0}).digest == parse_policy_config(DENSE).digest


def test_the_digest_of_checkpoints_from_before_glm_is_the_same():
    assert parse_policy_config(DENSE).digest == "534ff24e8ea44a89"
    assert parse_policy_config(MIXTURE).digest == "6273da96b497e453"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text_config": {"num_hidden_layers": 10**8}}, "num_hidden_layers <= 1024"),
        ({"n_layers": 10**8}, "n_layers <= 1024"),
        (
            {"model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 10**8},
            "moe_num_experts <= 16384",
        ),
    ],
)
def test_fields_without_end_are_refused_before_a_model_is_built(change: dict[str, Any], says: str):
    with pytest.raises((SettingsError, DataError), match=says):
        parse_policy_config({"model_type": "mpt", "architectures": ["MptForCausalLM"], **change})


def test_fields_that_name_kernels_do_not_reach_the_class():
    config = {"model_type": "mpt", "architectures": ["MptForCausalLM"], "d_model": 64, "n_heads": 4, "n_layers": 2}
    named = {"_attn_implementation": "kernels/x", "attn_config": {"attn_implementation": "kernels/x"}}

    assert "kernels/x" not in parse_policy_config({**config, **named}).model_json


PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def test_angles_that_depend_on_the_longest_row_bound_the_positions():
    long = {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 32}
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}

    assert parse_policy_config(PHI3).max_position_embeddings == 512
    assert parse_policy_config({**PHI3, **long}).max_position_embeddings == 32
    llama_config = {**PHI3, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
    assert parse_policy_config({**llama_config, **dynamic}).max_position_embeddings == 512


@pytest.mark.parametrize("named", [5, True, "Phi3ForCausalLM", {"a": 1}, ["Phi3ForCausalLM", 5], [["Phi3ForCausalLM"]]])
def test_architectures_that_are_no_names_are_refused(named: Any):
    with pytest.raises(DataError, match="names of classes as architectures"):
        parse_policy_config({**PHI3, "architectures": named})


def test_a_router_loss_that_only_the_class_has_is_refused():
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "output_router_logits": True}

    with pytest.raises(SettingsError, match="router_aux_loss_coef with output_router_logits"):
        parse_policy_config(config)
    assert parse_policy_config({**config, "router_aux_loss_coef": 0.0}).model_json


def test_dropout_is_off_in_every_part_of_a_configuration():
    text = {"model_type": "gemma3_text", "attention_dropout": 0.3}
    config = read_config(json.dumps({"model_type": "gemma3", "text_config": text}))

    assert config.text_config.attention_dropout == 0.0
    mpt = read_config(json.dumps({"model_type": "mpt", "resid_pdrop": 0.2, "attn_config": {"attn_pdrop": 1}}))
    assert (mpt.resid_pdrop, mpt.attn_config.attn_pdrop) == (0.0, 0)


def test_a_folder_with_whole_numbers_is_refused_by_name():
    class_of = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

    with pytest.raises(SettingsError, match=r"tensor 'model\.layers\.0\..*\.tid2eid' of .* has whole"):
        tensor_shapes(parse_policy_config({**class_of, **sizes, "moe_intermediate_size": 32, "n_routed_experts": 4}))


def test_experts_cannot_be_given_to_the_routers_of_a_class(make_batch: Callable[..., Batch]):
    config = parse_policy_config({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    batch = make_batch((3, 4))
    experts = Ragged(np.zeros((7, 32, 2), np.int16), batch.ragged("input_ids").offsets)

    assert config.is_routed_by_class
    assert not parse_policy_config(PHI3).is_routed_by_class
    with pytest.raises(ShapeError, match="cannot be replayed: MixtralForCausalLM is computed by transformers' class"):
        check_tokens(batch.with_columns({"routed_experts": experts}), config)


LINEAR = {"rope_type": "linear", "factor": 2.0}
DIALECTS: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_theta": 500000, "rope_parameters": {}, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": LINEAR | {"rope_theta": 3e5}, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {
        "rope_theta": 5e5,
        "rope_scaling": {n: v for n, v in LLAMA3.items() if not n.startswith("o")} | {"type": "llama3"},
    },
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_of_the_rotary_embedding_is_read_as_transformers_reads_it(dialect: dict[str, Any]):
    config = llama(**dialect, model_type="llama")
    found, read = parse_policy_config(config), read_config(canonical_json(config)).rope_parameters

    assert found.rope_base == read["rope_theta"]
    kind = {NoneType: "default", LinearRopeScaling: "linear", Llama3RopeScaling: "llama3"}[type(found.rope_scaling)]
    assert kind == read["rope_type"]
    if found.rope_scaling is not None:
        assert asdict(found.rope_scaling).items() <= read.items()


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": LINEAR | {"rope_theta": 7e5},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
        ),
        ("gpt_neox", {"rotary_emb_base": 5e5, "rotary_pct": 0.5}),
        ("mistral", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("glm4", {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "pad_token_id": 0}),
        ("qwen2_moe", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e5}),
    ],
)
def test_a_class_computes_the_angles_that_transformers_reads_from_the_folder(
    tmp_path: Path, model_type: str, fields: dict[str, Any]
):
    sizes = {name: value for name, value in DENSE.items() if name != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **fields}))
    read = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    expected = AutoModelForCausalLM.from_config(read, trust_remote_code=False)
    config = json.loads((tmp_path / "config.json").read_text())

    found = build_model(canonical_json(config))

    angles = {name: buffer for name, buffer in expected.named_buffers() if "inv_freq" in name}
    assert angles
    assert all(torch.equal(found.get_buffer(name), buffer) for name, buffer in angles.items())


def test_a_configuration_that_transformers_cannot_build_is_refused():
    nested = {"layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": {"rope_theta": 7e5}}}
    config = parse_policy_config({**DENSE, **nested, "model_type": "qwen3"}, backend="transformers")

    with pytest.raises(DataError, match=r"transformers cannot build the model that config\.json describes: KeyError"):
        tensor_shapes(config)
