"""The device of a process, and that no other code chooses one by name."""

import re
from pathlib import Path

import pytest
import torch

from rl_core.devices import own_device

ROOT = Path(__file__).resolve().parents[3]

CUDA = re.compile(r"""["']cuda[:"']|torch\.cuda\b|\bis_cuda\b|\bcuda\.\w+\(""")

ALLOWED = {
    "apps/rl-trainer-parts/src/rl_trainer_parts/machine/query.py": "tells what CUDA says about the machine",
    "packages/rl-core/src/rl_core/gpus.py": "CUDA's statistics of its memory",
    "packages/rl-core/src/rl_core/weights/broadcast_group.py": "NCCL works in CUDA's streams",
    "packages/rl-core/src/rl_core/weights/ipc.py": "CUDA's handles of memory",
    "packages/rl-distill/src/rl_distill/megatron/attention/varlen.py": "capabilities of kernels for CUDA",
    "packages/rl-distill/src/rl_distill/megatron/cpu.py": "stands for torch.cuda in Megatron's modules",
    "packages/rl-distill/src/rl_distill/megatron/experts.py": "a fault of CUDA's kernels for Blackwell",
    "packages/rl-distill/src/rl_distill/megatron/setup.py": "kernels that only CUDA has",
}
"""Files that may name CUDA, each with the interface of CUDA that it uses."""


def naming_cuda() -> set[str]:
    """Return the files of our sources that name CUDA outside comments and docstrings."""
    found = set()
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]:
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
        if CUDA.search(code):
            found.add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.one_python
def test_only_cudas_own_interfaces_name_it() -> None:
    assert naming_cuda() == set(ALLOWED)


def test_a_process_without_an_accelerator_computes_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert own_device() == torch.device("cpu")


def test_a_process_computes_on_its_current_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert own_device() == torch.device("cuda", 3)
