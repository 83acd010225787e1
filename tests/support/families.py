"""Tiny random models of many architectures of transformers, by a name of ours."""

from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
WINDOW = {"sliding_window": 4}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 96}


def _without(*names: str, **changes: Any) -> dict[str, Any]:
    """Return BASE without some fields, for classes that compute or lack them."""
    return {name: value for name, value in BASE.items() if name not in names} | changes


PLAIN = _without("head_dim")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # attention, normalization and heads
    "mistral-window": ("mistral", BASE | WINDOW),
    "ministral3": ("ministral3", BASE | {"sliding_window": None}),
    "gemma": ("gemma", BASE),
    "gemma2": ("gemma2", BASE | WINDOW | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        BASE | WINDOW | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4": (
        "gemma4_text",
        BASE
        | WINDOW
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 128,
        },
    ),
    "phi3": ("phi3", PLAIN | {"sliding_window": None}),
    "phi": ("phi", PLAIN),
    "olmo": ("olmo", PLAIN),
    "olmo2": ("olmo2", PLAIN),
    "olmo3": ("olmo3", PLAIN | WINDOW),
    "smollm3": ("smollm3", PLAIN | {"no_rope_layer_interval": 2}),
    "cohere": ("cohere", PLAIN | {"logit_scale": 0.25}),
    "cohere2": (
        "cohere2",
        BASE | WINDOW | {"logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": (
        "granite",
        PLAIN | {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
    "glm": ("glm", BASE | {"partial_rotary_factor": 0.5}),
    "glm4": ("glm4", BASE | {"partial_rotary_factor": 0.5}),
    "exaone4": ("exaone4", BASE | WINDOW | {"sliding_window_pattern": 2}),
    "seed-oss": ("seed_oss", BASE),
    "hunyuan": ("hunyuan_v1_dense", BASE),
    "ernie4.5": ("ernie4_5", BASE),
    "apertus": ("apertus", BASE | {"hidden_act": "xielu"}),
    "starcoder2": ("starcoder2", PLAIN | WINDOW),
    "stablelm": ("stablelm", PLAIN),
    "nemotron": ("nemotron", BASE),
    "arcee": ("arcee", BASE),
    "helium": ("helium", BASE),
    "falcon": ("falcon", _without("num_key_value_heads", "head_dim", "intermediate_size")),
    "bloom": ("bloom", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gpt2": ("gpt2", GPT2 | {"vocab_size": 128}),
    "gptj": ("gptj", GPT2 | {"vocab_size": 128, "rotary_dim": 8}),
    "gpt-neox": ("gpt_neox", _without("head_dim", "num_key_value_heads")),
    # mixtures
    "mixtral": ("mixtral", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": ("qwen2_moe", PLAIN | MIXTURE | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}),
    "gpt-oss": (
        "gpt_oss",
        BASE
        | WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        PLAIN | LATENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", PLAIN | LATENT),
    "olmoe": ("olmoe", PLAIN | {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("phimoe", PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "minimax-m2": ("minimax_m2", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "granite-moe": ("granitemoe", PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        BASE
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    # layers with a state
    "qwen3-next": (
        "qwen3_next",
        BASE | MIXTURE | LINEAR | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3.5": ("qwen3_5_text", BASE | LINEAR),
    "lfm2": ("lfm2", BASE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "falcon-h1": (
        "falcon_h1",
        BASE
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
        | {"mamba_n_groups": 1, "mamba_chunk_size": 32},
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        PLAIN
        | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
        | {"mamba_n_groups": 1, "mamba_expand": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 32},
    ),
    "mamba": ("mamba", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
}
"""transformers' model type and the fields of its configuration, by name."""

UNSERVED: dict[str, str] = {
    "cohere2": "its logprobs are wrong by 0.4 nats, which the canary finds",
    "apertus": "vLLM keeps the parameters of its activation in bfloat16: 0.01 nats, which the probes find",
    "gpt-oss": "vLLM cannot load its experts again, which the round trip finds",
    "deepseek-v3": "its latent attention is wrong by 3.5 nats on CPUs, which the canary finds",
    "glm4-moe-lite": "its latent attention is wrong by 3.5 nats on CPUs, which the canary finds",
    "phimoe": "vLLM knows the name PhiMoEForCausalLM only, and cannot run transformers' class",
    "minimax-m2": "vLLM loads no router bias of these names",
    "qwen3-next": "vLLM computes its linear attention only in bfloat16 on CPUs",
    "qwen3.5": "vLLM's class imports torchvision, which fails beside torch for CPUs",
    "lfm2": "vLLM expects fields that transformers' configuration does not have",
    "falcon-h1": "vLLM serves -exp(A_log) under the tensor's name, which the first proof refuses",
    "mamba": "vLLM has no kernel for its state on CPUs",
}
"""Why vLLM on a CPU does not serve a family. It serves all others live, with each update proven."""

SERVED_IN_CI = ("gemma2", "glm4", "granite-moe", "cohere2")
"""A tied head without a layer, joined matrices in the folder, layers that only a round trip proves, and a refusal."""

STATEFUL = ("falcon-h1", "granite-hybrid", "mamba", "qwen3-next")
"""Families for which vLLM needs `enable_prefix_caching = false`: it cannot share a layer's state."""

IN_CI = (
    *("mistral-window", "gemma2", "gemma4", "phi3", "granite", "gpt2", "gptj", "gpt-neox", "bloom"),
    *("mixtral", "gpt-oss", "deepseek-v3", "phimoe", "qwen3-next", "falcon-h1"),
)
"""One family for each mechanism; the soak runs all."""


def make_family(name: str, folder: Path, **changes: Any) -> None:
    """Write the random model of a family, without a tokenizer; `changes` replace fields of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(fields | changes))
    model = AutoModelForCausalLM.from_config(
        config, trust_remote_code=False, attn_implementation="eager", dtype=torch.float32
    )
    random = torch.Generator().manual_seed(1)
    stored = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in model.state_dict())]
    with torch.no_grad():
        for _, tensor in stored:  # biases, norms, sinks and buffers: a lost one must be seen
            if tensor.ndim <= 1 and tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=random).to(tensor.dtype))
    model.save_pretrained(folder)
