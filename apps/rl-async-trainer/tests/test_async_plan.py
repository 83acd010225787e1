"""The plan of `rl-async-trainer train --dry-run`."""

import json
from pathlib import Path

import pytest
from invented_inputs import invented_inputs

from rl_async_trainer.plan import describe_async_plan
from rl_async_trainer.settings import AsyncSettings
from rl_trainer_parts.settings.sources import build_settings

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    ("placement", "where"),
    [("inline", "in the rollouter's process;"), ("process", "in a process of its own;")],
)
def test_what_has_no_process_of_its_own_is_in_that_of_its_role(tmp_path: Path, placement: str, where: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    values = {
        "policy": {"path": tmp_path},
        "prompts": {"train": "train.jsonl"},
        "reward": {"function": "exact_match"},
        "rollout": {"engine": "vllm", "placement": placement},
    }
    settings = build_settings(values, kind=AsyncSettings)
    text = describe_async_plan(settings, invented_inputs(train=30))
    (engine,) = [line for line in text.splitlines() if line.startswith("  engine     vllm")]
    assert where in engine
    assert "one rank, in the learner host's process" in text
    assert "learner's process" not in text
