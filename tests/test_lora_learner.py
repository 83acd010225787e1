"""Adapters in the Megatron learner equal peft on transformers: names, logprobs, gradients and steps.

`packages/rl-distill/tests/test_megatron_lora.py` compares every layout with autograd of the merged weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from rearranged_ranks import RearrangedRanks
from rounding import rounding_bound
from torch import Tensor

from rl_core import Batch, Ragged, RowKey
from rl_core.cluster import ClusterOptions
from rl_core.data import offsets_of
from rl_core.weights import PEFT_PREFIX
from rl_distill import LearnerOptions, LoraOptions, ParallelOptions
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective

RANK, ALPHA, BETAS, LEARNING_RATE = 4, 6.0, (0.9, 0.95), 1e-2
OPTIONS = LearnerOptions(
    learning_rate=LEARNING_RATE,
    betas=BETAS,
    clip_grad=0.0,
    weight_decay=0.0,
    micro_batch_tokens=24,
    num_threads=1,
    recompute="full",
)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYOUTS = {
    ("TP2+SP", "dense"): ParallelOptions(ranks=2, tensor=2, sequence=True),
    ("TP2", "some"): ParallelOptions(ranks=2, tensor=2),
    ("PP2 interleaved", "dense"): ParallelOptions(ranks=2, pipeline=2, virtual_pipeline=2),
    ("CP2", "dense"): ParallelOptions(ranks=2, context=2),
    ("EP2, distributed optimizer", "mixture"): ParallelOptions(ranks=2, expert=2, distributed_optimizer=True),
}
"""Layouts, and the case that each one trains."""
SEQUENCES = [np.random.default_rng(length).integers(0, 40, length).astype(np.int32) for length in (7, 3, 12, 9, 5)]


@dataclass(frozen=True)
class Case:
    """A policy and its adapter, trained with peft.

    Attributes:
        policy: Folder of the policy.
        adapter: Folder of the initial adapter; its B matrices are not zero.
        lora: Options of our learner for this adapter.
        logprobs: Logprobs of the sequences before training.
        gradients: Gradients of the first step, by the names in the folder.
        after: A and B matrices after three steps of AdamW.
    """

    policy: Path
    adapter: Path
    lora: LoraOptions
    logprobs: list[Tensor]
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense": ("Qwen3", {"tie_word_embeddings": True}, {"target_modules": "all-linear"}, {}),
    "mixture": ("Qwen3Moe", MIXTURE, {"target_modules": ATTENTION}, {"target_modules": ("all-linear",)}),
    "some": (
        "Qwen2",
        {},
        {"target_modules": r".*layers\.[12]\.(self_attn\.[qv]_proj|mlp\..*_proj)", "use_rslora": True},
        {"target_modules": ("layers.[12].self_attn.[qv]_proj", "layers.[12].mlp.*"), "rslora": True},
    ),
}
"""Family, changes to its config, peft's options, and ours."""


def train_with_peft(folder: Path, name: str) -> Case:
    """Train three steps on all sequences, and keep the gradients of the first."""
    family, changes, of_peft, ours = CASES[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    torch.manual_seed(3)
    base = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    base.save_pretrained(folder / "policy")
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **of_peft))
    trained = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder / "adapter")
    adam = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, betas=BETAS, eps=OPTIONS.eps, weight_decay=0.0)
    total, logprobs, gradients = sum(len(s) - 1 for s in SEQUENCES), [], {}
    for step in range(3):
        adam.zero_grad()
        rows = [logprobs_of(model, sequence) for sequence in SEQUENCES]
        (-torch.cat(rows).sum() / total).backward()
        if step == 0:
            logprobs = [row.detach() for row in rows]
            gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        adam.step()
    lora = LoraOptions(rank=RANK, alpha=ALPHA, path=folder / "adapter", **ours)
    after = {n: p.detach() for n, p in trained.items()}
    return Case(folder / "policy", folder / "adapter", lora, logprobs, gradients, after)


def logprobs_of(model: Any, sequence: Any) -> Tensor:
    ids = torch.from_numpy(sequence).long()
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1)


def batch() -> Batch:
    offsets = offsets_of([len(s) for s in SEQUENCES])
    mask = np.ones(int(offsets[-1]), dtype=bool)
    mask[offsets[:-1]] = False
    columns = {
        "input_ids": np.concatenate(SEQUENCES),
        "loss_mask": mask,
        "loss_weights": (mask / mask.sum()).astype(np.float32),
    }
    keys = [RowKey(str(row), 0, 0) for row in range(len(SEQUENCES))]
    return Batch(keys, {name: Ragged(column, offsets) for name, column in columns.items()})


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: train_with_peft(tmp_path_factory.mktemp(name), name) for name in CASES}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RearrangedRanks]:
    started = RearrangedRanks(ParallelOptions(ranks=2), cluster=ClusterOptions(kind="process"), num_threads=1)
    yield started
    started.close()


def check(learner: MegatronLearner, case: Case, folder: Path) -> None:
    """Check that logprobs, gradients and three steps equal peft's; Adam's first moment gives the gradient of step 1."""
    found = learner.logprobs(batch())
    expected = np.concatenate([np.concatenate([[0.0], row.numpy()]) for row in case.logprobs])
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=rounding_bound(1.0))
    step = learner.train_step(batch(), supervised_objective)
    assert step.loss == pytest.approx(-float(torch.cat(case.logprobs).mean()), rel=rounding_bound(1.0))
    norm = torch.stack([gradient.norm() for gradient in case.gradients.values()]).norm()
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)
    learner.save(folder)
    state = TensorFolder(folder / "state")
    for name, gradient in case.gradients.items():
        moment = f"exp_avg/{name.removeprefix(PEFT_PREFIX)}"
        piece = Piece(name=moment, shape=tuple(gradient.shape), offsets=(0, 0), tensor=torch.empty(gradient.shape))
        state.read([piece])
        torch.testing.assert_close(piece.tensor / (1.0 - BETAS[0]), gradient, rtol=1e-5, atol=1e-6)
    for _ in range(2):
        learner.train_step(batch(), supervised_objective)
    adapter = learner.export_adapter()
    assert adapter.keys() == case.after.keys()
    for name, tensor in case.after.items():
        scale = case.lora.scaling if name.endswith("lora_B.weight") else 1.0
        torch.testing.assert_close(adapter[name] / scale, tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_learner_is_peft(name: str, cases: dict[str, Case], tmp_path: Path):
    check(MegatronLearner(cases[name].policy, OPTIONS, lora=cases[name].lora), cases[name], tmp_path / "saved")


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_ranks_are_peft(layout: str, name: str, ranks: RearrangedRanks, cases: dict[str, Case], tmp_path: Path):
    case = cases[name]
    ranks.rearrange(LAYOUTS[layout, name])
    check(MegatronLearner(case.policy, OPTIONS, ranks=ranks, lora=case.lora), case, tmp_path / "saved")
