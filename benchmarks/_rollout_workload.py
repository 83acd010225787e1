"""Workloads of the rollout benchmark: policies with and without an end token, and random prompts."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

RAGGED, UPDATE, EXPERTS = "ragged", "weight_update", "experts"
WORKLOADS = ("equal", RAGGED, UPDATE, EXPERTS)
NUM_EXPERTS, TOP_K = 16, 4
"""Number of experts per layer in `experts`; together they are four times as wide as a dense layer."""
END_TOKEN = 1
HEAD_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of a run.

    Attributes:
        hidden_size: Hidden size of the policy, a Qwen3 with random weights.
        num_layers: Layers of the policy.
        vocab_size: Vocabulary of the policy; tokens are nearly equally likely, so it is the mean length in `ragged`.
        num_prompts: Prompts per round.
        group_size: Samples per prompt.
        prompt_tokens: Tokens of each prompt.
        max_tokens: Maximum response length, which every response in `equal` has.
        kv_cache_gib: KV cache of each vLLM engine.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_prompts: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    kv_cache_gib: float = 2.0


PRESETS = {
    "tiny": Preset(
        hidden_size=64,
        num_layers=2,
        vocab_size=16,
        num_prompts=4,
        group_size=2,
        prompt_tokens=4,
        max_tokens=8,
        kv_cache_gib=0.0625,
    ),
    "6m": Preset(
        hidden_size=256, num_layers=6, vocab_size=128, num_prompts=64, group_size=4, prompt_tokens=32, max_tokens=128
    ),
    "77m": Preset(
        hidden_size=768, num_layers=8, vocab_size=8192, num_prompts=16, group_size=4, prompt_tokens=32, max_tokens=128
    ),
}
"""Presets by name: for the smoke test, for generation on two cores, and for large weights."""
UPDATE_PRESETS = {"tiny": "tiny", "6m": "77m", "77m": "77m"}
"""Preset for weight updates, if generation uses another."""


def make_prompts(preset: Preset, *, seed: int) -> NDArray[np.int32]:
    """Return [num_prompts, prompt_tokens] int32 tokens, without the end token."""
    random = np.random.default_rng(seed)
    return random.integers(2, preset.vocab_size, (preset.num_prompts, preset.prompt_tokens), dtype=np.int32)


def write_policy(preset: Preset, workload: str, folder: Path) -> None:
    """Write the policy of a workload: only `ragged` has an end token, and `experts` is a mixture.

    It does without torch and transformers, whose import takes longer than a quick benchmark.
    """
    hidden, heads = preset.hidden_size, preset.hidden_size // HEAD_DIM or 1
    groups = max(heads // 2, 1)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": preset.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": preset.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
        "eos_token_id": END_TOKEN if workload == RAGGED else None,
    }
    if workload == EXPERTS:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": hidden,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
        }
    matrices = {
        "self_attn.q_proj": (heads * HEAD_DIM, hidden),
        "self_attn.k_proj": (groups * HEAD_DIM, hidden),
        "self_attn.v_proj": (groups * HEAD_DIM, hidden),
        "self_attn.o_proj": (hidden, heads * HEAD_DIM),
        **(mixture_of(hidden) if workload == EXPERTS else mlp_of("mlp", hidden, 4 * hidden)),
    }
    norms = {
        "self_attn.q_norm": HEAD_DIM,
        "self_attn.k_norm": HEAD_DIM,
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
    }
    random = np.random.default_rng(0)
    weights = {"model.embed_tokens.weight": weights_of(random, preset.vocab_size, hidden)}
    for layer in range(preset.num_layers):
        for name, shape in matrices.items():
            weights[f"model.layers.{layer}.{name}.weight"] = weights_of(random, *shape)
        for name, size in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(size, dtype=np.float32)
    weights["model.norm.weight"] = np.ones(hidden, dtype=np.float32)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def mlp_of(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of its three matrices."""
    return {f"{prefix}.{name}_proj": (width, hidden) for name in ("gate", "up")} | {
        f"{prefix}.down_proj": (hidden, width)
    }


def mixture_of(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a mixture's router and experts."""
    experts = [mlp_of(f"mlp.experts.{index}", hidden, hidden) for index in range(NUM_EXPERTS)]
    return {"mlp.gate": (NUM_EXPERTS, hidden), **{name: shape for one in experts for name, shape in one.items()}}


def weights_of(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Return [rows, columns] values so small that all next tokens are nearly equally likely."""
    return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.01)
