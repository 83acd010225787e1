"""Settings that need a GPU, a library or shared memory that this machine may lack."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_core import devices
from rl_trainer_parts.machine import needs
from rl_trainer_parts.machine.needs import machine_problems
from rl_trainer_parts.settings.sources import build_settings

FUSED, ENGINE = {"kernels": "fused"}, {"kernels": "transformer_engine"}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 212_690,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
JOINED = {"cluster": {"ray_address": "127.0.0.1:6379"}}


def found(**sections: dict[str, Any]) -> list[str]:
    settings = {
        "policy": {"path": Path("p")},
        "prompts": {"train": Path("t")},
        "reward": {"function": "exact_match"},
    }
    for name, values in sections.items():
        settings.setdefault(name, {}).update(values)
    return [" ".join(line.split()[:6]) for line in machine_problems(build_settings(settings))]


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(needs, "find_spec", lambda _: None)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"optimizer": {"kernels": "plain"}}, []),
        ({"optimizer": FUSED}, ['optimizer.kernels = "fused" needs a GPU,']),
        (
            {"optimizer": ENGINE},
            [f'optimizer.kernels = "transformer_engine" needs {what}' for what in ("a GPU,", "the module")],
        ),
        ({"weights": {"transport": "ipc"}}, ['weights.transport = "ipc" needs a GPU,']),
        ({"weights": {"transport": "nccl"}}, ['weights.transport = "nccl" needs a GPU,']),
        ({"weights": {"transport": "direct"}}, []),
        ({"optimizer": ENGINE, "weights": {"transport": "nccl"}, **JOINED}, []),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(sections: dict[str, Any], said: list[str]) -> None:
    assert found(**sections) == said


@pytest.mark.usefixtures("_no_gpu")
def test_weights_that_do_not_fit_into_shared_memory_are_refused_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    policy, apart = {"path": tmp_path}, {"placement": "process"}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64_000_000))
    assert found(policy=policy, rollout=apart) == ["shared memory (/dev/shm) must hold 109.2"]
    assert found(policy=policy, rollout=apart, weights={"transport": "tcp"}) == []
    assert found(policy=policy, rollout=apart, **JOINED) == []
    assert found(policy=policy) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=110_000_000))
    assert found(policy=policy, rollout=apart) == []


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("seen_by", ["driver", "torch"])
def test_with_a_gpu_the_library_alone_is_missing(seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if seen_by == "driver" else "")
    if seen_by == "torch":
        monkeypatch.setattr(devices, "own_device", lambda: torch.device("cuda"))
    assert found(optimizer=FUSED, weights={"transport": "ipc"}) == []
    assert found(optimizer=ENGINE) == ['optimizer.kernels = "transformer_engine" needs the module']
    monkeypatch.setattr(needs, "find_spec", lambda _: object())
    assert found(optimizer=ENGINE) == []
