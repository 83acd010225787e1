"""Adapters on the Megatron learner, against autograd of the merged weights: every layout, family and dtype.

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
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.errors import CheckpointError, NotReadyError, SettingsError
from rl_core.weights import PEFT_PREFIX
from rl_distill.checkpoints.torch_dist import Piece, TensorFolder
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.lora_targets import adapter_shapes, adapter_size
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.policy_config import parse_policy_config, read_policy_config
from rl_distill.torch_learner import TorchLearner

MakeBatch = Callable[..., Batch]
Started = Any  # conftest's
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
OPTIONS = LearnerOptions(learning_rate=1e-3, clip_grad=0.0, micro_batch_tokens=24, num_threads=1, eps=1e-6)
LORA = LoraOptions(rank=3, alpha=5.0)
LAYOUTS = {
    "one": ParallelOptions(),
    "TP2": ParallelOptions(ranks=2, tensor=2),
    "TP2+SP": ParallelOptions(ranks=2, tensor=2, sequence=True),
    "PP2": ParallelOptions(ranks=2, pipeline=2),
    "PP2 interleaved": ParallelOptions(ranks=2, pipeline=2, virtual_pipeline=2),
    "CP2": ParallelOptions(ranks=2, context=2),
    "DP2": ParallelOptions(ranks=2),
    "DP2 distributed optimizer": ParallelOptions(ranks=2, distributed_optimizer=True),
    "EP2": ParallelOptions(ranks=2, expert=2),
    "TP2+SP CP2": ParallelOptions(ranks=4, tensor=2, sequence=True, context=2),
    "TP2 PP2": ParallelOptions(ranks=4, tensor=2, pipeline=2),
    "TP2 DP2 distributed optimizer": ParallelOptions(ranks=4, tensor=2, distributed_optimizer=True),
    "PP2 interleaved DP2": ParallelOptions(ranks=4, pipeline=2, virtual_pipeline=2),
    "TP2 EP2, experts whole": ParallelOptions(ranks=4, tensor=2, sequence=True, expert=2, expert_tensor=1),
    "PP2 EP2": ParallelOptions(ranks=4, pipeline=2, expert=2),
}
DENSE = [name for name, layout in LAYOUTS.items() if layout.expert == 1]
CASES = [
    *[("Qwen3ForCausalLM", layout) for layout in DENSE],
    *[("Qwen2ForCausalLM", layout) for layout in ("one", "TP2", "TP2+SP")],
    ("LlamaForCausalLM", "one"),
    *[("Qwen3MoeForCausalLM", layout) for layout in ("one", "EP2", "TP2 EP2, experts whole", "PP2 EP2")],
    *[("Glm4MoeForCausalLM", layout) for layout in ("TP2+SP", "PP2 interleaved", "EP2")],
]


def policy_gradient(
    logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch
) -> tuple[Tensor, MetricSums]:
    weights = micro.columns["loss_weights"]
    loss = -(logprobs.exp() * micro.columns["advantages"] * weights).sum()
    return loss if entropy is None else loss - 0.1 * (entropy * weights).sum(), {}


class Adapted:
    """A policy, an adapter whose B are not zeros, and what transformers says of the merged weights."""

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
    """As peft saves it."""
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
    """The weights that the adapter changes, with it."""
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
    """From a checkpoint."""
    learner.save(folder)
    state = TensorFolder(folder / "state")
    found = {
        name.removeprefix(f"{kind}/"): Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.empty(shape))
        for name, shape in state.shapes().items()
        if name.startswith(f"{kind}/")
    }
    state.read(list(found.values()))
    return {name: piece.tensor for name, piece in found.items()}


def learner_of(adapted: Adapted, layout: str, two_ranks: Started, four_ranks: Started, **changes: Any) -> MegatronLearner:
    parallel = LAYOUTS[layout]
    started = {1: None, 2: two_ranks, 4: four_ranks}[parallel.ranks]
    ranks = None if started is None else started.in_layout(parallel)
    return MegatronLearner(adapted.policy, replace(OPTIONS, **changes), ranks=ranks, lora=adapted.lora)


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
        torch.testing.assert_close(of_step, gradient, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name} {text}")
