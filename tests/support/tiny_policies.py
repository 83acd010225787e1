"""Tiny policies of each architecture, with random weights that hide no norm, bias or head."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 40

BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "Qwen2ForCausalLM": {"tie_word_embeddings": True, "rope_theta": 1e6},
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    "Glm4MoeForCausalLM": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
"""Additional settings of each architecture's tiny policy."""


def tiny_config(architecture: str = "Qwen3ForCausalLM", **changes: Any) -> Any:
    kind = getattr(transformers, architecture).config_class
    return kind(**{**BASE, "architectures": [architecture], **FAMILIES[architecture], **changes})


def write_policy(policy_dir: Path, architecture: str = "Qwen3ForCausalLM", **changes: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, architecture)(tiny_config(architecture, **changes)).float()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide missing or swapped norms
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):  # zeros would hide a missing bias
                torch.nn.init.normal_(parameter, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(policy_dir)
    (policy_dir / "tokenizer_config.json").write_text('{"made": "for a test"}')
    return policy_dir
