"""Megatron runs on a CPU without side effects on other code."""

import sys
import types

import pytest
import torch

import rl_distill.megatron.cpu as cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is replaced")


def megatron_modules() -> list[types.ModuleType]:
    return [m for name, m in sys.modules.items() if name.startswith("megatron.core") and hasattr(m, "torch")]


def test_torch_itself_is_left_alone():
    names = ("zeros", "ones", "empty", "full", "tensor", "arange")
    before = [getattr(torch, name) for name in names]
    before_cuda = dict(vars(torch.cuda))

    cpu.install_cpu_compatibility()

    assert [getattr(torch, name) for name in names] == before
    assert dict(vars(torch.cuda)) == before_cuda
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")


def test_megatron_sees_the_cpu_where_it_asks_for_cuda():
    cpu.install_cpu_compatibility()
    from megatron.core.optimizer import clip_grads

    seen = clip_grads.torch
    assert seen.zeros(2, device="cuda").device.type == "cpu"
    assert seen.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert seen.zeros(2, device="meta").device.type == "meta"
    assert seen.cuda.current_device() == torch.device("cpu")
    assert isinstance(seen.cuda.Stream, type)
    assert isinstance(seen.cuda.Event, type)
    assert seen.nn is torch.nn
    assert seen.cuda.is_available() is False


def test_installing_twice_does_not_stack():
    cpu.install_cpu_compatibility()
    before = [module.torch for module in megatron_modules()]

    cpu.install_cpu_compatibility()

    assert [module.torch for module in megatron_modules()] == before


def test_type_names_last_as_long_as_the_context():
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    other = torch.nn.Parameter(torch.zeros(1))

    with cpu.cuda_type_names([parameter]):
        assert parameter.type() == "torch.cuda.BFloat16Tensor"
        assert other.type() == "torch.FloatTensor"

    assert parameter.type() == "torch.BFloat16Tensor"


def test_an_untested_megatron_is_warned_about(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "__version__", "0.99.0")

    with pytest.warns(RuntimeWarning, match=r"megatron-core 0\.99\.0 was not tested"):
        cpu.check_megatron_version()
