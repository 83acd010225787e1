"""Tiny policies and batches for the learners' tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.batch import Batch
from rl_core.ragged import Ragged, offsets_of
from rl_core.row_keys import RowKey

VOCAB_SIZE = 40


def tiny_config(**changes: Any) -> Qwen3Config:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "architectures": ["Qwen3ForCausalLM"],
    }
    return Qwen3Config(**{**fields, **changes})


def write_policy(policy_dir: Path, **changes: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(tiny_config(**changes)).float()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out or swapped
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(policy_dir)
    (policy_dir / "tokenizer_config.json").write_text('{"made": "for a test"}')
    return policy_dir


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False, num_key_value_heads=4)


@pytest.fixture(scope="session")
def policy_writer() -> Callable[..., Path]:
    return write_policy


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """Rows of random tokens; the first two of each are the prompt, and advantages alternate."""

    def make(lengths: Sequence[int], *, seed: int = 0) -> Batch:
        random = np.random.default_rng(seed)
        offsets = offsets_of(lengths)
        total = int(offsets[-1])
        positions = np.arange(total) - np.repeat(offsets[:-1], lengths)
        mask = positions >= 2
        signs = np.repeat(np.where(np.arange(len(lengths)) % 2, 1.0, -0.5), lengths)
        values = {
            "input_ids": random.integers(0, VOCAB_SIZE, total).astype(np.int32),
            "loss_mask": mask,
            "loss_weights": (mask / mask.sum()).astype(np.float32),
            "advantages": (signs * mask).astype(np.float32),
        }
        keys = [RowKey(f"prompt{i}", 0, 0) for i in range(len(lengths))]
        return Batch(keys, {name: Ragged(column, offsets) for name, column in values.items()})

    return make
