"""The matrices that an adapter changes; `test_megatron_lora` compares sizes with real ranks."""

from dataclasses import replace

import pytest

from rl_core.errors import SettingsError
from rl_distill.architecture.lora_targets import adapted_modules, adapter_shapes, adapter_size
from rl_distill.architecture.mixture_config import MixtureConfig
from rl_distill.architecture.policy_config import PolicyConfig
from rl_distill.options import LoraOptions

DENSE = PolicyConfig(
    architecture="Qwen3MoeForCausalLM",
    num_layers=12,
    hidden_size=8,
    ffn_hidden_size=24,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    max_position_embeddings=64,
    norm_eps=1e-6,
    rope_base=1e4,
    is_tied=True,
    initializer_range=0.02,
)
EXPERTS = MixtureConfig(num_experts=4, top_k=2, norm_topk_prob=True, ffn_hidden_size=6, layers=tuple(range(2, 12)))
MIXTURE = replace(DENSE, mixture=EXPERTS)


def modules(*patterns: str, config: PolicyConfig = DENSE) -> list[str]:
    names = adapted_modules(config, LoraOptions(rank=2, target_modules=patterns))
    return [name.removeprefix("model.layers.") for name in names]


def test_all_linear_are_the_matrices_of_the_layers() -> None:
    shapes = adapted_modules(DENSE, LoraOptions(rank=2))
    assert len(shapes) == 12 * 7
    assert shapes["model.layers.3.self_attn.q_proj"] == (16, 8)
    assert shapes["model.layers.3.self_attn.v_proj"] == (8, 8)
    assert shapes["model.layers.3.mlp.down_proj"] == (8, 24)
    assert len(modules("all-linear", config=MIXTURE)) == 12 * 4
    assert adapted_modules(DENSE, LoraOptions()) == {}


def test_patterns_are_of_the_ends_of_names() -> None:
    assert modules("q_proj") == [f"{layer}.self_attn.q_proj" for layer in range(12)]
    assert modules("layers.1?.mlp.*") == [f"{i}.mlp.{m}_proj" for i in (10, 11) for m in ("gate", "up", "down")]
    assert modules("layers.1.self_attn.[qk]_proj", "layers.0.mlp.up_proj") == [
        "0.mlp.up_proj",
        "1.self_attn.q_proj",
        "1.self_attn.k_proj",
    ]
    assert modules("model.layers.2.self_attn.o_proj") == ["2.self_attn.o_proj"]
    assert len(modules("*", config=MIXTURE)) == 12 * 4


def test_each_matrix_has_an_a_and_a_b() -> None:
    options = LoraOptions(rank=2, target_modules=("layers.0.self_attn.q_proj",))
    assert adapter_shapes(DENSE, options) == {
        "model.layers.0.self_attn.q_proj.lora_A.weight": (2, 8),
        "model.layers.0.self_attn.q_proj.lora_B.weight": (16, 2),
    }
    assert adapter_size(DENSE, options) == 2 * 8 + 16 * 2


@pytest.mark.parametrize(
    ("pattern", "config", "said"),
    [
        ("lm_head", DENSE, "lm_head cannot have an adapter; only matrices of the layers can"),
        ("embed_tokens", DENSE, "model.embed_tokens cannot have an adapter"),
        ("*layernorm", DENSE, "model.layers.0.input_layernorm cannot have an adapter"),
        (
            "query",
            DENSE,
            "it matches no matrix. Choose among mlp.down_proj, mlp.gate_proj, mlp.up_proj, self_attn.k_proj",
        ),
        ("_proj", DENSE, "it matches no matrix"),
        (
            "mlp.gate",
            MIXTURE,
            "model.layers.2.mlp.gate cannot have an adapter; only attention matrices of a mixture of experts can",
        ),
        ("experts.*.up_proj", MIXTURE, "model.layers.2.mlp.experts.0.up_proj cannot have an adapter"),
        ("mlp.*", MIXTURE, "Choose among self_attn.k_proj, self_attn.o_proj, self_attn.q_proj, self_attn.v_proj"),
    ],
)
def test_what_cannot_be_is_refused_by_name(pattern: str, config: PolicyConfig, said: str) -> None:
    with pytest.raises(SettingsError, match=f"target_modules has '{pattern}'".replace("*", r"\*")) as caught:
        modules("v_proj", pattern, config=config)
    assert said in str(caught.value)
