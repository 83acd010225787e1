"""Settings that need a GPU or a library that this machine may lack."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_trainer_parts.checks import this_machine
from rl_trainer_parts.checks.this_machine import machine_problems
from rl_trainer_parts.settings.sources import build_settings

FUSED, ENGINE = {"kernels": "fused"}, {"kernels": "transformer_engine"}
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(this_machine, "find_spec", lambda _: None)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"learner": {"kernels": "plain"}}, []),
        ({"learner": FUSED}, ['learner.kernels = "fused" needs a GPU,']),
        (
            {"learner": ENGINE},
            [f'learner.kernels = "transformer_engine" needs {what}' for what in ("a GPU,", "the module")],
        ),
        ({"weights": {"transport": "ipc"}}, ['weights.transport = "ipc" needs a GPU,']),
        ({"weights": {"transport": "nccl"}}, ['weights.transport = "nccl" needs a GPU,']),
        ({"weights": {"transport": "direct"}}, []),
        ({"learner": FUSED, "policy": {"learner": "torch"}}, []),
        ({"learner": ENGINE, "weights": {"transport": "nccl"}, **JOINED}, []),
    ],
)
def test_without_a_gpu(sections: dict[str, Any], said: list[str]) -> None:
    assert found(**sections) == said


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("seen_by", ["driver", "torch"])
def test_with_a_gpu_the_library_alone_is_missing(seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if seen_by == "driver" else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen_by == "torch")
    assert found(learner=FUSED, weights={"transport": "ipc"}) == []
    assert found(learner=ENGINE) == ['learner.kernels = "transformer_engine" needs the module']
    monkeypatch.setattr(this_machine, "find_spec", lambda _: object())
    assert found(learner=ENGINE) == []
