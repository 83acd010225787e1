"""Transformer Engine's layers: refused if unavailable, and created through megatron's classes.

The library needs CUDA to be installed. The tests on a CPU check our layer specification with stand-ins that have the
signatures of megatron's classes and use torch's matrices; a test on a GPU uses the library itself.
"""

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.extensions.transformer_engine as te
import pytest
import torch
from equal_tensors import different_tensors
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from rl_core.errors import SettingsError
from rl_distill.megatron import setup
from rl_distill.megatron.kernels import Kernels, Layers, chosen_kernels, layers_of
from rl_distill.megatron.layers import RMSNorm
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.parallel_layout import check_learner

OPTIONS = LearnerOptions(learning_rate=1e-3, kernels="transformer_engine")
IS_INSTALLED = find_spec("transformer_engine") is not None
POLICY: Any = SimpleNamespace(mixture=None, num_layers=2, model_json="")
"""Placeholder with the two facts that the checks of a learner read."""


def test_an_adapter_is_refused():
    check_learner(OPTIONS, ParallelOptions(), POLICY)
    with pytest.raises(SettingsError, match=r"does not support adapters; found lora\.rank = 8"):
        check_learner(OPTIONS, ParallelOptions(), POLICY, lora=LoraOptions(rank=8))


def test_a_cpu_is_refused():
    with pytest.raises(SettingsError, match="needs a GPU"):
        chosen_kernels("transformer_engine", device=torch.device("cpu"), dtype=torch.float32, head_dim=16)


def test_a_library_that_is_there_and_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(te, "HAVE_TE", False)
    with pytest.raises(SettingsError, match="which cannot be imported"):
        layers_of(Kernels(layers="transformer_engine"))
    assert layers_of(Kernels()) == Layers(ColumnParallelLinear, RowParallelLinear, RMSNorm)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replace megatron's classes with stand-ins; return the number of instances by kind."""
    counts: Counter[str] = Counter()

    class Column(ColumnParallelLinear):
        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: Any,
            init_method: Callable[..., Any],
            gather_output: bool,
            bias: bool,
            skip_bias_add: bool,
            is_expert: bool,
            skip_weight_param_allocation: bool = False,
            tp_comm_buffer_name: str | None = None,
            tp_group: Any = None,
            stride: int = 1,
        ) -> None:
            assert not gather_output
            assert not skip_weight_param_allocation
            counts["column"] += 1
            names = ("gather_output", "bias", "skip_bias_add", "is_expert", "tp_group", "stride")
            given = {name: value for name, value in locals().items() if name in names}
            super().__init__(input_size, output_size, config=config, init_method=init_method, **given)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)

    class Row(RowParallelLinear):
        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: Any,
            init_method: Callable[..., Any],
            bias: bool,
            input_is_parallel: bool,
            skip_bias_add: bool,
            is_expert: bool,
            tp_comm_buffer_name: str | None = None,
            tp_group: Any = None,
        ) -> None:
            assert input_is_parallel
            counts["row"] += 1
            names = ("bias", "input_is_parallel", "skip_bias_add", "is_expert", "tp_group")
            given = {name: value for name, value in locals().items() if name in names}
            super().__init__(input_size, output_size, config=config, init_method=init_method, **given)

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
            assert config.normalization == "RMSNorm"
            counts["norm"] += 1
            return RMSNorm(config, hidden_size, eps)

    monkeypatch.setattr(te, "HAVE_TE", True)
    for name, kind in {"TEColumnParallelLinear": Column, "TERowParallelLinear": Row, "TENorm": Norm}.items():
        monkeypatch.setattr(te, name, kind)
    return counts


@pytest.mark.parametrize(
    ("architecture", "numbers"),
    [
        ("Qwen3ForCausalLM", {"column": 4, "row": 4, "norm": 9}),
        ("Glm4MoeForCausalLM", {"column": 4, "row": 4, "norm": 9}),  # a dense layer and a layer with shared experts
    ],
)
def test_every_matrix_and_norm_but_experts_and_head_is_the_librarys(
    architecture: str,
    numbers: dict[str, int],
    made: Counter[str],
    tmp_path: Path,
    policy_writer: Any,
    make_batch: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    policy, batch = policy_writer(tmp_path / "policy", architecture), make_batch([7, 12, 3, 9])
    options = LearnerOptions(learning_rate=1e-3, num_threads=1)
    plain = MegatronLearner(policy, options)
    assert not made
    monkeypatch.setattr(setup, "chosen_kernels", lambda *_, **__: Kernels(layers="transformer_engine"))
    learner = MegatronLearner(policy, options)

    assert made == numbers
    found, expected = (one.train_step(batch, supervised_objective) for one in (learner, plain))
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    weights = plain.export_weights()
    assert different_tensors(weights, learner.export_weights()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build")
@pytest.mark.skipif(not IS_INSTALLED, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Glm4MoeForCausalLM"])
def test_a_step_with_the_library_is_one_without(architecture: str, tmp_path: Path, policy_writer: Any, make_batch: Any):
    # In bfloat16, its kernels need sizes that are multiples of 16 bytes.
    policy = policy_writer(tmp_path / "policy", architecture, hidden_size=64, intermediate_size=128)
    batch = make_batch([7, 12, 3, 9])
    options = LearnerOptions(learning_rate=1e-3, dtype="bfloat16", kernels="fused")
    plain = MegatronLearner(policy, options)
    learner = MegatronLearner(policy, LearnerOptions(learning_rate=1e-3, dtype="bfloat16", kernels=OPTIONS.kernels))
    assert learner.export_weights().keys() == plain.export_weights().keys()
    for _ in range(2):
        found, expected = (one.train_step(batch, supervised_objective) for one in (learner, plain))
        assert found.loss == pytest.approx(expected.loss, rel=2e-2)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.1)
