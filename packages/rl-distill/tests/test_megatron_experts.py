"""Experts in two stacked weights, computed in turn and grouped, compared with megatron's own module."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from equal_tensors import different_tensors
from megatron.core import tensor_parallel
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from rounding import BFLOAT16, FLOAT32, rounding_bound
from torch import Tensor

import rl_distill.megatron.setup as setup
import rl_distill.products as products
from rl_core.data import Batch
from rl_core.errors import SettingsError, ShapeError
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.megatron.experts import Experts
from rl_distill.megatron.kernels import Kernels, PolicyTransformerConfig
from rl_distill.megatron.layers import SwiGLU
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.megatron.model_spec import transformer_config
from rl_distill.objectives import supervised_objective
from rl_distill.options import LearnerOptions, ParallelOptions
from rl_distill.parallel_layout import check_layout
from rl_distill.products import computing_with, has_onednn

pytestmark = pytest.mark.usefixtures("one_rank")

HIDDEN = 32
COUNTS = {
    "all": [5, 1, 9, 3],
    "some without tokens": [0, 4, 0, 2],
    "all tokens to one": [0, 0, 7, 0],
    "no tokens": [0, 0, 0, 0],
}
TURNS, GROUPED = Kernels(experts="turns"), Kernels(experts="grouped")
FUSED = Kernels(experts="grouped", is_fused=True)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def config_of(policy_dir: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> PolicyTransformerConfig:
    policy = parse_policy_config(read_policy_config(policy_dir))
    return transformer_config(policy, dtype=dtype, init_method=lambda weight: weight, **changes)


def make_experts(policy_dir: Path, dtype: torch.dtype = torch.float32, kernels: Kernels = TURNS) -> Experts:
    config = config_of(policy_dir, dtype, kernels=kernels)
    made = Experts(config.num_moe_experts, config, pg_collection=get_default_pg_collection())
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def megatrons(config: PolicyTransformerConfig) -> SequentialMLP:
    linear = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    parts = MLPSubmodules(linear_fc1=linear[0], linear_fc2=linear[1], activation_func=SwiGLU)
    return SequentialMLP(config.num_moe_experts, config, parts, pg_collection=get_default_pg_collection())


def inputs(counts: list[int], dtype: torch.dtype, *, seed: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their shares, and a gradient of the outputs."""
    random = torch.Generator().manual_seed(seed)
    tokens, grad = (torch.randn(sum(counts), HIDDEN, generator=random).to(dtype) for _ in range(2))
    shares = torch.rand(sum(counts), generator=random)  # float32, as from a router with float32 outputs
    return tokens.requires_grad_(), shares.requires_grad_(), grad


def computed(experts: Experts, counts: list[int], *, seed: int = 4) -> dict[str, Tensor]:
    """Return outputs and gradients; those of weights are read from megatron's buffers or from `grad`."""
    weights = dict(experts.named_parameters())
    device, kind = weights["linear_fc1"].device, weights["linear_fc1"].dtype
    tokens, shares, grad = (one.to(device).detach() for one in inputs(counts, kind, seed=seed))
    tokens.requires_grad_()
    shares.requires_grad_()
    out, bias = experts(tokens, torch.tensor(counts, device=device), shares)
    assert bias is None
    out.backward(grad)
    found = {"out": out.detach(), "tokens": tokens.grad, "shares": shares.grad}
    for name, weight in weights.items():
        is_in_buffer = getattr(weight, "grad_added_to_main_grad", False)
        found[name] = weight.main_grad.clone() if is_in_buffer else weight.grad
        weight.grad = None
    return found


def computed_by_megatron(experts: Experts, counts: list[int], grad: Tensor | None = None) -> dict[str, Tensor]:
    theirs = megatrons(experts.config)
    for index, expert in enumerate(theirs.local_experts):
        expert.linear_fc1.weight.data.copy_(experts.linear_fc1[index])
        expert.linear_fc2.weight.data.copy_(experts.linear_fc2[index])
    tokens, shares, drawn = inputs(counts, experts.linear_fc1.dtype)
    out, _ = theirs(tokens, torch.tensor(counts), shares)
    out.backward(drawn if grad is None else grad)
    found = {"out": out.detach(), "tokens": tokens.grad, "shares": shares.grad}
    for name in ("linear_fc1", "linear_fc2"):
        found[name] = torch.stack([getattr(expert, name).weight.grad for expert in theirs.local_experts])
    return found


def with_buffers(experts: Experts) -> Experts:
    for parameter in experts.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
    return experts


@pytest.mark.parametrize("counts", [COUNTS["all"], COUNTS["no tokens"]])
@pytest.mark.parametrize("kernels", [TURNS, GROUPED, FUSED], ids=["in turn", "grouped", "fused"])
def test_an_expanded_gradient_and_no_tokens_are_taken(counts: list[int], kernels: Kernels, mixture_policy: Path):
    experts = make_experts(mixture_policy, kernels=kernels)
    tokens, shares, _ = inputs(counts, torch.float32)
    out, _ = experts(tokens, torch.tensor(counts), shares)
    out.sum().backward()
    expected = computed_by_megatron(experts, counts, grad=torch.ones_like(out))
    torch.testing.assert_close(tokens.grad, expected["tokens"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert", [1, 2])
def test_weights_are_marked_as_megatrons(expert: int, mixture_policy: Path):
    config = config_of(mixture_policy, parallel=ParallelOptions(ranks=expert, expert=expert))
    experts = Experts(2, config, pg_collection=get_default_pg_collection())
    theirs = megatrons(config).local_experts[0]

    assert {name: tuple(weight.shape) for name, weight in experts.named_parameters()} == {
        "linear_fc1": (2, *theirs.linear_fc1.weight.shape),
        "linear_fc2": (2, *theirs.linear_fc2.weight.shape),
    }
    for name, ours in experts.named_parameters():
        expected = dict(vars(getattr(theirs, name).weight))
        expected["partition_dim"] += 1
        assert vars(ours) == expected
        assert ours.allreduce == (expert == 1)


@pytest.mark.parametrize("kernels", [TURNS, GROUPED], ids=["in turn", "grouped"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_outputs_and_gradients_are_megatrons(
    counts: list[int], kernels: Kernels, dtype: torch.dtype, mixture_policy: Path
):
    experts = make_experts(mixture_policy, dtype, kernels)
    expected = computed_by_megatron(experts, counts)

    found = computed(experts, counts)
    in_buffers = computed(with_buffers(experts), counts)

    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)
        of_before = 1.0 if name.startswith("linear") else 0.0
        torch.testing.assert_close(in_buffers[name].to(tensor.dtype), tensor + of_before, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_is_in_turn(counts: list[int], dtype: torch.dtype, mixture_policy: Path):
    ways = [with_buffers(make_experts(mixture_policy, dtype, kernels)) for kernels in (TURNS, GROUPED)]

    expected, found = (computed(experts, counts) for experts in ways)

    epsilon = FLOAT32 if dtype == torch.float32 else BFLOAT16
    for name, tensor in expected.items():
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        bound = rounding_bound(largest, roundings=8, epsilon=epsilon)
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("kernels", [TURNS, GROUPED], ids=["in turn", "grouped"])
def test_micro_batches_add_up(kernels: Kernels, mixture_policy: Path):
    experts = with_buffers(make_experts(mixture_policy, kernels=kernels))

    for seed, counts in enumerate(COUNTS.values()):
        found = computed(experts, counts, seed=seed)

    alone = make_experts(mixture_policy)
    parts = [computed(alone, counts, seed=seed) for seed, counts in enumerate(COUNTS.values())]
    for name, _ in experts.named_parameters():
        torch.testing.assert_close(found[name], 1.0 + sum(part[name] for part in parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", [TURNS, GROUPED], ids=["in turn", "grouped"])
def test_frozen_weights_get_no_gradient(kernels: Kernels, mixture_policy: Path):
    experts = make_experts(mixture_policy, kernels=kernels)
    expected = computed(experts, COUNTS["all"])
    experts.requires_grad_(False)
    tokens, shares, grad = inputs(COUNTS["all"], torch.float32)

    experts(tokens, torch.tensor(COUNTS["all"]), shares)[0].backward(grad)

    assert torch.equal(tokens.grad, expected["tokens"])
    assert torch.equal(shares.grad, expected["shares"])
    assert {weight.grad for weight in experts.parameters()} == {None}


def test_sizes_that_grouped_products_cannot_have_are_refused(policy_writer: Callable[..., Path], tmp_path: Path):
    policy = policy_writer(tmp_path, "Qwen3MoeForCausalLM", moe_intermediate_size=20)

    make_experts(policy, torch.float32, GROUPED)
    make_experts(policy, torch.bfloat16, TURNS)
    with pytest.raises(ShapeError, match=r"moe_intermediate_size / expert_tensor must be a multiple of 8 .* found 20"):
        make_experts(policy, torch.bfloat16, GROUPED)


@pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN products on this machine")
@pytest.mark.parametrize("kernels", [TURNS, GROUPED], ids=["in turn", "grouped"])
def test_products_are_those_of_the_run(kernels: Kernels, mixture_policy: Path, monkeypatch: pytest.MonkeyPatch):
    experts, counts = with_buffers(make_experts(mixture_policy, kernels=kernels)), [0, 40, 2, 30]
    expected = computed(experts, counts)
    for parameter in experts.parameters():
        parameter.main_grad.fill_(1.0)
    calls, own = [], products._onednn
    monkeypatch.setattr(products, "_MIN_OPERATIONS", 4096)
    monkeypatch.setattr(products, "_onednn", lambda a, b: calls.append(1) or own(a, b))

    with computing_with("onednn"):
        found = computed(experts, counts)

    assert len(calls) == 2 * 6  # two experts; the third has too few tokens
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_learner_that_recomputes_learns_the_same(name: str, mixture_policy: Path, make_batch: Callable[..., Batch]):
    options = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=12, num_threads=1, dtype=name)
    kept, recomputed = (
        MegatronLearner(mixture_policy, replace(options, recompute=recompute)) for recompute in ("none", "full")
    )

    assert trained(recomputed, make_batch) == trained(kept, make_batch)
    weights = recomputed.export_weights()
    assert different_tensors(weights, kept.export_weights()) == []


def trained(learner: MegatronLearner, make_batch: Callable[..., Batch]) -> list[tuple[float, float]]:
    """Return losses and gradient norms of two steps."""
    batches = (make_batch((7, 3, 9, 5), seed=seed) for seed in range(2))
    steps = [learner.train_step(batch, supervised_objective) for batch in batches]
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_learner_learns_the_same_grouped(
    name: Literal["float32", "bfloat16"],
    architecture: str,
    policy_writer: Callable[..., Path],
    make_batch: Callable[..., Batch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    policy = policy_writer(tmp_path, architecture)
    options = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=12, num_threads=1, dtype=name)
    in_turn = MegatronLearner(policy, options)
    monkeypatch.setattr(setup, "chosen_kernels", lambda *_, **__: GROUPED)
    grouped = MegatronLearner(policy, options)

    bound = rounding_bound(1.0) if name == "float32" else rounding_bound(1.0, roundings=4, epsilon=BFLOAT16)
    for found, expected in zip(trained(grouped, make_batch), trained(in_turn, make_batch), strict=True):
        assert found == pytest.approx(expected, rel=bound)
    weights, alone = dict(grouped.export_weights()), dict(in_turn.export_weights())
    assert weights.keys() == alone.keys()
    # In bfloat16, a small gradient may have either sign, and Adam moves each weight by the learning rate, twice.
    moved = 1e-5 if name == "float32" else 2 * 2 * options.learning_rate
    for name_of_weight, tensor in alone.items():
        torch.testing.assert_close(weights[name_of_weight], tensor, rtol=bound, atol=moved, msg=name_of_weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_on_a_gpu_grouped_is_in_turn(counts: list[int], dtype: torch.dtype, mixture_policy: Path):
    counts = [40 * count for count in counts]
    expected = computed(make_experts(mixture_policy, dtype), counts)
    for kernels in (TURNS, GROUPED):
        found = computed(make_experts(mixture_policy, dtype, kernels).cuda(), counts)
        tolerance = 1e-3 if dtype == torch.float32 else 3e-2  # TF32 is off; sums have a different order
        for name, tensor in expected.items():
            scale = float(tensor.abs().max()) if tensor.numel() else 1.0
            torch.testing.assert_close(found[name].cpu(), tensor, rtol=0, atol=tolerance * scale, msg=name)
            if name.startswith("linear"):  # experts without tokens get zeros, not uninitialized memory
                assert not found[name][torch.tensor(counts) == 0].any()


def divisible_policy(policy_dir: Path) -> PolicyConfig:
    """Return a mixture whose sizes every number up to 8 divides."""
    policy = parse_policy_config(read_policy_config(policy_dir))
    assert policy.mixture is not None
    mixture = replace(policy.mixture, num_experts=840, ffn_hidden_size=840, layers=tuple(range(840)))
    heads = {"num_heads": 840, "num_key_value_heads": 840}
    return replace(policy, **heads, ffn_hidden_size=840, num_layers=840, mixture=mixture)


def accepted_layouts(policy: PolicyConfig) -> Iterator[ParallelOptions]:
    """Yield every layout of up to 8 ranks that the checks accept."""
    sizes = range(1, 9)
    for ranks, tensor, pipeline, context in product(sizes, repeat=4):
        if ranks % (tensor * pipeline * context):
            continue
        for expert, expert_tensor in product(sizes, repeat=2):
            layout = ParallelOptions(
                ranks=ranks,
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                expert=expert,
                expert_tensor=expert_tensor,
                sequence=tensor > 1,
            )
            with suppress(SettingsError):
                check_layout(layout, policy)
                yield layout


def test_in_every_layout_gradients_of_experts_are_summed_over_the_ranks_with_the_same_experts(mixture_policy: Path):
    policy = divisible_policy(mixture_policy)
    layouts = list(accepted_layouts(policy))
    for layout in layouts:
        size, order = layout.expert_tensor or layout.tensor, "tp-cp-ep-dp-pp"
        copies = layout.ranks // (size * layout.expert * layout.pipeline)
        dense = RankGenerator(layout.tensor, 1, layout.data, layout.pipeline, layout.context, order)
        of_experts = RankGenerator(size, layout.expert, copies, layout.pipeline, 1, order)
        config = transformer_config(policy, dtype=torch.float32, init_method=lambda weight: weight, parallel=layout)
        group = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda size=size: size))
        is_alike = sorted(of_experts.get_ranks("dp")) == sorted(dense.get_ranks("cp-dp"))
        for name, weight in Experts(1, config, pg_collection=group).named_parameters():
            assert not weight.allreduce or is_alike, (layout, name)
        split, tensors = of_experts.get_ranks("tp"), [set(ranks) for ranks in dense.get_ranks("tp")]
        assert split
        assert all(any(ranks >= set(part) for ranks in tensors) for part in split), layout
    assert len(layouts) > 100
