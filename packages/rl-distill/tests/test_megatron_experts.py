"""Experts in a single node of autograd, against megatron's own module."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

import rl_distill.products as products
from rl_core.data import Batch
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.megatron.experts import Experts
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.megatron.model_spec import transformer_config
from rl_distill.megatron.swiglu import SwiGLU
from rl_distill.options import LearnerOptions
from rl_distill.products import computing_with, has_onednn
from rl_distill.supervised import supervised_objective

pytestmark = pytest.mark.usefixtures("one_rank")

HIDDEN = 32
COUNTS = {
    "all": [5, 1, 9, 3],
    "some without tokens": [0, 4, 0, 2],
    "all tokens to one": [0, 0, 7, 0],
    "no tokens": [0, 0, 0, 0],
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def experts(request: pytest.FixtureRequest, mixture_policy: Path) -> Experts:
    return make_experts(mixture_policy, request.param)


def make_experts(policy_dir: Path, dtype: torch.dtype) -> Experts:
    policy = parse_policy_config(read_policy_config(policy_dir))
    config = transformer_config(policy, dtype=dtype, init_method=lambda weight: weight)
    linear = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    parts = MLPSubmodules(linear_fc1=linear[0], linear_fc2=linear[1], activation_func=SwiGLU)
    made = Experts(policy.num_experts, config, parts, pg_collection=get_default_pg_collection())
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def computed(
    forward: Callable[..., tuple[Tensor, None]], experts: Experts, counts: list[int], *, seed: int = 4
) -> dict[str, Tensor]:
    """Outputs and gradients; of weights where they are, in their buffers or their own."""
    random, dtype = torch.Generator().manual_seed(seed), next(experts.parameters()).dtype
    tokens, grad = (torch.randn(sum(counts), HIDDEN, generator=random).to(dtype) for _ in range(2))
    shares = torch.rand(sum(counts), generator=random).requires_grad_()  # float32, as a router may give them
    tokens.requires_grad_()
    out, bias = forward(experts, tokens, torch.tensor(counts), shares)
    assert bias is None
    out.backward(grad)
    found = {"out": out.detach(), "tokens": tokens.grad, "shares": shares.grad}
    for name, parameter in experts.named_parameters():
        found[name] = parameter.grad if parameter.grad is not None else parameter.main_grad.clone()
        parameter.grad = None
    return found


def with_buffers(experts: Experts) -> Experts:
    for parameter in experts.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
    return experts


def test_parameters_have_megatrons_names(mixture_policy: Path):
    experts = make_experts(mixture_policy, torch.float32)
    assert [name for name, _ in experts.named_parameters()][:2] == [
        "local_experts.0.linear_fc1.weight",
        "local_experts.0.linear_fc2.weight",
    ]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_outputs_and_gradients_are_megatrons(counts: list[int], experts: Experts):
    expected = computed(SequentialMLP.forward, experts, counts)

    found = computed(Experts.forward, experts, counts)
    in_buffers = computed(Experts.forward, with_buffers(experts), counts)

    tolerance = 1e-6 if expected["out"].dtype == torch.float32 else 3e-2
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)
        of_before = 1.0 if name.startswith("local_experts") else 0.0
        torch.testing.assert_close(in_buffers[name].to(tensor.dtype), tensor + of_before, rtol=tolerance, atol=1e-5)


def test_micro_batches_add_up(mixture_policy: Path):
    experts = with_buffers(make_experts(mixture_policy, torch.float32))

    for seed, counts in enumerate(COUNTS.values()):
        found = computed(Experts.forward, experts, counts, seed=seed)

    alone = make_experts(mixture_policy, torch.float32)
    parts = [computed(Experts.forward, alone, counts, seed=seed) for seed, counts in enumerate(COUNTS.values())]
    for name, _ in experts.named_parameters():
        torch.testing.assert_close(found[name], 1.0 + sum(part[name] for part in parts), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN products on this machine")
def test_products_are_those_of_the_run(mixture_policy: Path, monkeypatch: pytest.MonkeyPatch):
    experts, counts = with_buffers(make_experts(mixture_policy, torch.float32)), [0, 40, 2, 30]
    expected = computed(Experts.forward, experts, counts)
    for parameter in experts.parameters():
        parameter.main_grad.fill_(1.0)
    calls, own = [], products._onednn
    monkeypatch.setattr(products, "_MIN_OPERATIONS", 4096)
    monkeypatch.setattr(products, "_onednn", lambda a, b: calls.append(1) or own(a, b))

    with computing_with("onednn"):
        found = computed(Experts.forward, experts, counts)

    assert len(calls) == 2 * 6  # of two experts; a third has too few tokens
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_that_recomputes_learns_the_same(dtype: str, mixture_policy: Path, make_batch: Callable[..., Batch]):
    options = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=12, num_threads=1, dtype=dtype)
    kept, recomputed = (
        MegatronLearner(mixture_policy, replace(options, recompute=recompute)) for recompute in ("none", "full")
    )

    for seed in range(2):
        batch = make_batch((7, 3, 9, 5), seed=seed)
        found, expected = (learner.train_step(batch, supervised_objective) for learner in (recomputed, kept))
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    weights = recomputed.export_weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in kept.export_weights().items())
