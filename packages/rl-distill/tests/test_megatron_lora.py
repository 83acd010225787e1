"""Adapters on the Megatron learner, compared with autograd of the merged weights: every layout, family and dtype.

The gradients of A and B follow from that of the merged weight W + s B A: s B.T @ dW and s dW @ A.T.
`tests/test_lora_learner.py` compares with peft.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from rounding import rounding_bound
from safetensors.torch import save_file
from torch import Tensor
from torch_learner import TorchLearner

from rl_core.data.batch import Batch
from rl_core.errors import NotReadyError, SettingsError
from rl_core.weights import PEFT_PREFIX
from rl_distill.architecture.lora_targets import adapter_shapes, adapter_size
from rl_distill.architecture.memory import rank_memory
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
Started = Any  # `Started` of conftest.py
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
OPTIONS = LearnerOptions(learning_rate=1e-3, clip_grad=0.0, micro_batch_tokens=24, num_threads=1, eps=1e-6)
LORA = LoraOptions(rank=3, alpha=5.0)
LAYOUTS = {
    "one": ParallelOptions(),
    "TP2": ParallelOptions(ranks=2, tensor=2),
    "TP2+SP": ParallelOptions(ranks=2, tensor=2, sequence=True),
    "PP2": ParallelOptions(ranks=2, pipeline=2),
    "EP2": ParallelOptions(ranks=2, expert=2),
    "TP2+SP CP2": ParallelOptions(ranks=4, tensor=2, sequence=True, context=2),
    "TP2 DP2 distributed optimizer": ParallelOptions(ranks=4, tensor=2, distributed_optimizer=True),
    "PP2 interleaved DP2": ParallelOptions(ranks=4, pipeline=2, virtual_pipeline=2),
    "TP2 EP2, experts whole": ParallelOptions(ranks=4, tensor=2, sequence=True, expert=2, expert_tensor=1),
}
CASES = [
    *[("Qwen3ForCausalLM", layout) for layout in ("one", "TP2+SP CP2", "PP2 interleaved DP2")],
    *[("Qwen2ForCausalLM", layout) for layout in ("one", "TP2")],
    ("LlamaForCausalLM", "one"),
    *[("Qwen3MoeForCausalLM", layout) for layout in ("one", "TP2 EP2, experts whole")],
    ("Glm4MoeForCausalLM", "EP2"),
]
"""`test_crossed_layouts.py` compares adapters in further layouts with one rank."""


def policy_gradient(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
    weights = micro.columns["loss_weights"]
    loss = -(logprobs.exp() * micro.columns["advantages"] * weights).sum()
    return loss if entropy is None else loss - 0.1 * (entropy * weights).sum(), {}


class Adapted:
    """A policy, an adapter whose B matrices are not zero, and transformers' results for the merged weights."""

    def __init__(self, folder: Path, policy: Path, batch: Batch) -> None:
        self.policy, self.batch = policy, batch
        self.config = parse_policy_config(read_policy_config(policy))
        random = torch.Generator().manual_seed(5)
        shapes = adapter_shapes(self.config, LORA)
        self.adapter = {name: torch.empty(shape).normal_(0, 0.1, generator=random) for name, shape in shapes.items()}
        self.lora = replace(LORA, path=write_adapter(folder / "adapter", self.adapter))
        self.merged = folder / "merged"
        shutil.copytree(policy, self.merged)
        learner = TorchLearner(policy, OPTIONS)
        weights = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
        save_file({**weights, **merged(weights, self.adapter)}, self.merged / "model.safetensors")
        learner = TorchLearner(self.merged, OPTIONS)
        self.logprobs = learner.logprobs(batch).values
        self.loss = learner.train_step(batch, policy_gradient, temperature=0.8, with_entropy=True).loss
        self.gradients = {}
        for name in {name.rsplit(".", 2)[0] for name in self.adapter}:
            of_weight, a, b = learner._parameters[f"{name}.weight"].grad, *self.pair(name)
            self.gradients[f"{name}.lora_A.weight"] = LORA.scaling * b.T @ of_weight
            self.gradients[f"{name}.lora_B.weight"] = LORA.scaling * of_weight @ a.T
        self.norm = float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        return self.adapter[f"{module}.lora_A.weight"], self.adapter[f"{module}.lora_B.weight"]


def write_adapter(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write an adapter in the format of peft."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA.rank,
        "lora_alpha": LORA.alpha,
        "use_rslora": LORA.rslora,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def merged(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapted weights, merged with the adapter."""
    found = {}
    for name in {name.rsplit(".", 2)[0] for name in adapter}:
        a, b = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        found[f"{name}.weight"] = weights[f"{name}.weight"] + LORA.scaling * b @ a
    return found


@pytest.fixture(scope="session")
def adapted_of(
    policy_writer: Callable[..., Path], make_batch: MakeBatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Adapted]:
    found: dict[str, Adapted] = {}

    def of(architecture: str) -> Adapted:
        if architecture not in found:
            folder = tmp_path_factory.mktemp(architecture)
            policy = policy_writer(folder / "policy", architecture, num_hidden_layers=4)
            found[architecture] = Adapted(folder, policy, make_batch(LENGTHS, num_prompts=3))
        return found[architecture]

    return of


def moments(learner: MegatronLearner, folder: Path, kind: str = "exp_avg") -> dict[str, Tensor]:
    """Return the optimizer's moments from a checkpoint."""
    learner.save(folder)
    state = TensorFolder(folder / "state")
    found = {
        name.removeprefix(f"{kind}/"): Piece(
            name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.empty(shape)
        )
        for name, shape in state.shapes().items()
        if name.startswith(f"{kind}/")
    }
    state.read(list(found.values()))
    return {name: piece.tensor for name, piece in found.items()}


def learner_of(
    adapted: Adapted, layout: str, two_ranks: Started, four_ranks: Started, **changes: Any
) -> MegatronLearner:
    parallel = LAYOUTS[layout]
    started = {1: None, 2: two_ranks, 4: four_ranks}[parallel.ranks]
    ranks = None if started is None else started.in_layout(parallel)
    return MegatronLearner(adapted.policy, replace(OPTIONS, **changes), ranks=ranks, lora=adapted.lora)


def check_memory(learner: MegatronLearner, parallel: ParallelOptions, config: PolicyConfig) -> None:
    """Check each rank's memory against the plan: to the byte, except for a distributed optimizer's padding."""
    dtype = learner._options.dtype
    stages = rank_memory(config, parallel, dtype=dtype, lora=learner._lora) * (parallel.ranks // parallel.pipeline)
    found = learner._ranks.call_all(RankHost.run, "policy", "memory", (), {})
    if not parallel.distributed_optimizer:
        assert sorted(found) == sorted(stages)
        return
    assert sorted(one.weights for one in found) == sorted(one.weights for one in stages)
    gradients, optimizer = ([sum(one[kind] for one in of) for of in (found, stages)] for kind in (1, 2))
    assert gradients[0] >= gradients[1]
    assert optimizer[0] == pytest.approx(optimizer[1], rel=1e-2)


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_gradients_are_those_of_the_merged_weights(
    architecture: str,
    layout: str,
    adapted_of: Callable[[str], Adapted],
    two_ranks: Started,
    four_ranks: Started,
    tmp_path: Path,
):
    adapted = adapted_of(architecture)
    recompute = "full" if LAYOUTS[layout].ranks == 4 or layout == "one" else "none"
    learner = learner_of(adapted, layout, two_ranks, four_ranks, recompute=recompute, shared_prefix_tokens=1)
    np.testing.assert_allclose(learner.logprobs(adapted.batch).values, adapted.logprobs, rtol=0, atol=5e-6)

    step = learner.train_step(adapted.batch, policy_gradient, temperature=0.8, with_entropy=True)

    assert step.loss == pytest.approx(adapted.loss, rel=1e-5, abs=1e-6)
    assert step.grad_norm == pytest.approx(adapted.norm, rel=1e-5)
    found = moments(learner, tmp_path / "saved")
    assert found.keys() == adapted.gradients.keys()
    for name, gradient in adapted.gradients.items():
        of_step = found[name] / (1.0 - OPTIONS.betas[0])
        torch.testing.assert_close(
            of_step, gradient, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name} {text}"
        )


def test_an_adapter_begins_alike_in_every_layout_and_changes_nothing(
    adapted_of: Callable[[str], Adapted], two_ranks: Started
):
    adapted = adapted_of("Qwen3ForCausalLM")
    full = MegatronLearner(adapted.policy, OPTIONS)
    alone = MegatronLearner(adapted.policy, OPTIONS, lora=LORA)
    first = alone.export_adapter()
    for name, tensor in first.items():
        bound = 0.0 if name.endswith("lora_B.weight") else tensor.shape[1] ** -0.5
        assert float(tensor.abs().max()) <= bound
        assert float(tensor.std()) == pytest.approx(bound / 3**0.5, rel=0.3)
    assert list(first) == [PEFT_PREFIX + name for name in adapted.adapter]
    assert np.array_equal(alone.logprobs(adapted.batch).values, full.logprobs(adapted.batch).values)
    assert alone.num_parameters == full.num_parameters == full.num_trained
    assert alone.num_trained == adapter_size(adapted.config, LORA) == sum(t.numel() for t in first.values())

    together = MegatronLearner(adapted.policy, OPTIONS, ranks=two_ranks.in_layout(LAYOUTS["TP2"]), lora=LORA)
    assert different_tensors(first, together.export_adapter()) == []
    assert together.num_parameters == full.num_parameters
    other = MegatronLearner(adapted.policy, replace(OPTIONS, seed=1), lora=LORA).export_adapter()
    assert not any(torch.equal(first[name], other[name]) for name in first if name.endswith("lora_A.weight"))


@pytest.mark.parametrize("layout", ["one", "TP2+SP"])
def test_the_base_stays_and_is_the_reference(layout: str, adapted_of: Callable[[str], Adapted], two_ranks: Started):
    adapted = adapted_of("Qwen3ForCausalLM")
    learner = learner_of(adapted, layout, two_ranks, None, clip_grad=0.1, weight_decay=0.1)
    base = {name: tensor.clone() for name, tensor in learner.export_base().items()}
    of_base = MegatronLearner(adapted.policy, OPTIONS).logprobs(adapted.batch).values
    memory = learner._ranks.call_all(RankHost.run, "policy", "memory", (), {})
    reference = learner.reference()
    np.testing.assert_allclose(reference.logprobs(adapted.batch).values, of_base, rtol=0, atol=5e-6)
    for _ in range(2):
        learner.train_step(adapted.batch, policy_gradient)

    after = learner.logprobs(adapted.batch).values
    assert learner.offload() > 0
    np.testing.assert_allclose(reference.logprobs(adapted.batch).values, of_base, rtol=0, atol=5e-6)
    assert np.array_equal(learner.logprobs(adapted.batch).values, after)
    assert float(np.abs(after - adapted.logprobs).max()) > 1e-3
    assert learner._ranks.call_all(RankHost.run, "policy", "memory", (), {})[0].weights == memory[0].weights
    weights, adapter = learner.export_weights(), learner.export_adapter()
    unscaled = {n.removeprefix(PEFT_PREFIX): t / (LORA.scaling if "lora_B" in n else 1.0) for n, t in adapter.items()}
    for name, tensor in {**base, **merged(base, unscaled)}.items():
        bound = rounding_bound(float(tensor.abs().max()), roundings=8)
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=bound)
    assert different_tensors(base, learner.export_base()) == []


def test_all_weights_have_no_adapter(tied_policy: Path):
    learner = MegatronLearner(tied_policy, OPTIONS)
    for refused in (learner.export_adapter, learner.reference):
        with pytest.raises(NotReadyError, match="trains all weights"):
            refused()
    weights = learner.export_weights()
    assert different_tensors(weights, learner.export_base()) == []
    with pytest.raises(SettingsError, match="target_modules has 'lm_head'"):
        MegatronLearner(tied_policy, OPTIONS, lora=replace(LORA, target_modules=("lm_head",)))


@pytest.mark.parametrize("layout", ["PP2", "TP2+SP"])
def test_some_matrices_of_some_layers(
    layout: str, adapted_of: Callable[[str], Adapted], two_ranks: Started, tmp_path: Path
):
    """Joined matrices are adapted only in part, and the second stage has no adapter."""
    adapted = adapted_of("Qwen3ForCausalLM")
    lora = replace(LORA, target_modules=("layers.0.self_attn.[kv]_proj", "layers.1.mlp.up_proj", "layers.1.*.o_proj"))
    kept = adapter_shapes(adapted.config, lora)
    lora = replace(lora, path=write_adapter(tmp_path / "some", {name: adapted.adapter[name] for name in kept}))
    learners = [
        MegatronLearner(adapted.policy, replace(OPTIONS, recompute="full"), ranks=ranks, lora=lora)
        for ranks in (None, two_ranks.in_layout(LAYOUTS[layout]))
    ]
    for _ in range(2):
        expected, found = (
            learner.train_step(adapted.batch, policy_gradient, with_entropy=True) for learner in learners
        )
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)  # the entropy does not cancel
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    weights = {name: tensor.clone() for name, tensor in learners[0].export_base().items()}
    adapter = {name: adapted.adapter[name] for name in kept}
    alone = MegatronLearner(adapted.policy, OPTIONS, lora=lora).export_weights()
    for name, tensor in {**weights, **merged(weights, adapter)}.items():
        torch.testing.assert_close(alone[name], tensor)
    check_memory(learners[1], LAYOUTS[layout], adapted.config)


@pytest.mark.parametrize("layout", ["one", "TP2 DP2 distributed optimizer"])
def test_bfloat16_goes_on_bit_for_bit(
    layout: str, adapted_of: Callable[[str], Adapted], four_ranks: Started, tmp_path: Path
):
    """A and B have float32 master weights. Dropout is reproduced from the step, also when layers are recomputed."""
    adapted = adapted_of("Qwen3ForCausalLM")

    def learner_in(**changes: Any) -> MegatronLearner:
        ranks = None if layout == "one" else four_ranks.in_layout(LAYOUTS[layout])
        options = replace(OPTIONS, dtype="bfloat16", **changes)
        return MegatronLearner(adapted.policy, options, ranks=ranks, lora=replace(adapted.lora, dropout=0.2))

    learner = learner_in()
    before = learner.logprobs(adapted.batch).values
    assert np.array_equal(learner.logprobs(adapted.batch).values, before)  # scoring has no dropout
    learner.train_step(adapted.batch, policy_gradient)
    learner.save(tmp_path / "saved")
    steps = [learner.train_step(adapted.batch, policy_gradient) for _ in range(2)]
    adapter = {name: tensor.clone() for name, tensor in learner.export_adapter().items()}
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}
    check_memory(learner, LAYOUTS[layout], adapted.config)

    resumed = learner_in(recompute="full")
    resumed.load(tmp_path / "saved")
    for expected in steps:
        found = resumed.train_step(adapted.batch, policy_gradient)
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert different_tensors(adapter, resumed.export_adapter()) == []
