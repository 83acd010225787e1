"""The plan of `rl-async-trainer train --dry-run`."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_async_trainer.plan import describe_async_plan
from rl_async_trainer.settings import AsyncSettings
from rl_trainer_parts.commands.plan import PromptCounts
from rl_trainer_parts.settings.sources import build_settings


@pytest.mark.parametrize(
    ("placement", "where"),
    [("inline", "in the rollouter's process;"), ("process", "in a process of its own;")],
)
def test_what_has_no_process_of_its_own_is_in_that_of_its_role(tmp_path: Path, placement: str, where: str) -> None:
    save_file({"a": np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
    values = {
        "policy": {"path": tmp_path},
        "prompts": {"train": "train.jsonl"},
        "reward": {"function": "exact_match"},
        "rollout": {"placement": placement},
    }
    settings = build_settings(values, kind=AsyncSettings)
    text = describe_async_plan(settings, PromptCounts(train=30, validation=0, test=0))
    (engine,) = [line for line in text.splitlines() if line.startswith("  engine     vllm")]
    assert where in engine
    assert "one rank, in the learner host's process" in text
    assert "learner's process" not in text
