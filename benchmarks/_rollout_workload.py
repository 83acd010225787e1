"""What the rollout benchmark generates: a policy that ends its responses or never does, and random prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

UPDATE = "weight_update"
WORKLOADS = ("equal", "ragged", UPDATE)
END_TOKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of a run.

    Attributes:
        hidden_size: Of the policy, a Qwen3 of random weights.
        num_layers: Of the policy.
        vocab_size: Of the policy; with nearly even probabilities, responses of `ragged` have about as many tokens.
        num_prompts: Prompts of a round.
        group_size: Samples of each.
        prompt_tokens: Of each prompt.
        max_tokens: Longest response; every response of `equal` is as long.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_prompts: int
    group_size: int
    prompt_tokens: int
    max_tokens: int


PRESETS = {
    "tiny": Preset(
        hidden_size=64, num_layers=2, vocab_size=16, num_prompts=4, group_size=2, prompt_tokens=4, max_tokens=8
    ),
    "6m": Preset(
        hidden_size=256, num_layers=6, vocab_size=128, num_prompts=64, group_size=4, prompt_tokens=32, max_tokens=128
    ),
    "77m": Preset(
        hidden_size=768, num_layers=8, vocab_size=8192, num_prompts=16, group_size=4, prompt_tokens=32, max_tokens=128
    ),
}
"""By name: for the smoke test, for generation on two cores, and for weights of which there are many."""
UPDATE_PRESETS = {"tiny": "tiny", "6m": "77m", "77m": "77m"}
"""Whose weights are updated where generation is with another preset."""


def make_prompts(preset: Preset, *, seed: int) -> NDArray[np.int32]:
    """[num_prompts, prompt_tokens] int32, without the end token."""
    random = np.random.default_rng(seed)
    return random.integers(2, preset.vocab_size, (preset.num_prompts, preset.prompt_tokens), dtype=np.int32)


def write_policy(preset: Preset, workload: str, folder: Path) -> None:
    """The policy of a workload: that of `equal` has no end token. The weights are the same."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        "vocab_size": preset.vocab_size,
        "hidden_size": preset.hidden_size,
        "intermediate_size": 4 * preset.hidden_size,
        "num_hidden_layers": preset.num_layers,
        "num_attention_heads": preset.hidden_size // 64 or 1,
        "num_key_value_heads": max(preset.hidden_size // 128, 1),
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.01,
    }
    config = transformers.Qwen3Config(**sizes, eos_token_id=END_TOKEN if workload == "ragged" else None)
    model = transformers.Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
