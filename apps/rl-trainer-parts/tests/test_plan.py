"""The plan of `train --dry-run`: arithmetic that can be checked by hand."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_trainer_parts.commands.plan import PromptCounts, count_parameters, describe_plan
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import build_settings

MILLION = 1_048_576


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Weights in two files, of two dtypes."""
    save_file({"a": np.zeros((1024, 1024), np.float32)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(1024, np.float16)}, tmp_path / "model-2.safetensors")
    return tmp_path


def plan_settings(policy: Path, **changes: dict[str, object]) -> Settings:
    values: dict[str, dict[str, object]] = {
        "policy": {"path": policy},
        "prompts": {"train": "train.jsonl", "max_tokens": 100},
        "reward": {"function": "exact_match"},
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_response_tokens": 28},
        "learner": {"micro_batch_tokens": 1000},
        "trainer": {"steps": 10, "minibatches": 2, "validate_every": 5, "checkpoint_every": 3},
    }
    return build_settings({**values, **{name: {**values.get(name, {}), **change} for name, change in changes.items()}})


def test_parameters_are_counted_from_headers(policy: Path) -> None:
    assert count_parameters(policy) == MILLION + 1024


def test_batch_arithmetic(policy: Path) -> None:
    text = describe_plan(plan_settings(policy), PromptCounts(train=30, validation=7, test=8))
    assert "6 prompts x 4 sessions = 24 trajectories" in text
    assert "2 optimizer update(s), of at most 4 micro-batches in all" in text  # 24 * 128 / 1000 = 3.07
    assert "100 + 28 = 128 a trajectory" in text
    assert "10 steps, 240 trajectories, 2.00 epochs" in text
    assert "30 to train on, 8 to test at both ends" in text
    assert "7 for validation every 5 steps" in text
    assert "responses to each" not in text
    several = plan_settings(policy, prompts={"validation_samples": 8, "validation_temperature": 0.6})
    assert "8 responses to each of these" in describe_plan(several, PromptCounts(train=30, validation=7, test=8))
    assert "checkpoints/step_N every 3 steps and at the end, the newest 2 kept" in text
    assert "Writes to runs/run/" in text


def test_roles_and_memory(policy: Path) -> None:
    counts = PromptCounts(train=30, validation=0, test=0)
    plain = describe_plan(plan_settings(policy), counts)
    assert "for 1,049,600 parameters" in plain
    assert "reference" not in plain
    assert "vllm, float32, in the learner's process; loop single_turn" in plain
    changes = {"algorithm": {"kl_coefficient": 0.01}, "rollout": {"placement": "process"}}
    changed = describe_plan(plan_settings(policy, **changes, engine={"dtype": "float16"}), counts)
    assert "vllm, float16" in changed
    assert "frozen copy of the policy (KL coefficient 0.01)" in changed
    assert "in a process of its own" in changed


def test_ranks_and_critic(policy: Path) -> None:
    changes = {
        "parallel": {"ranks": 4, "tensor": 2},
        "cluster": {"kind": "process", "cpus_per_rank": 0.5},
        "algorithm": {"advantage": "gae"},
        "trainer": {"epochs": 3},
    }
    text = describe_plan(plan_settings(policy, **changes), PromptCounts(train=30, validation=0, test=0))
    assert "4 ranks in processes of this machine: tensor 2, data 2" in text
    assert "set aside for each: 0.5 CPUs and 0 GPUs" in text
    assert "critic     the policy's layers under a value head of zeros; learning rate 1e-05" in text
    assert "in 6 optimizer update(s)" in text
    assert "over 4 ranks" in text
