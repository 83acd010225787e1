"""Muon, compared with its definition in float64 on transformers' gradients."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equal_tensors import different_tensors
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.errors import CheckpointError, SettingsError
from rl_distill.architecture.memory import rank_memory
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.megatron.host import RankHost
from rl_distill.megatron.learner import MegatronCritic, MegatronLearner
from rl_distill.megatron.muon import orthogonalized
from rl_distill.objectives import ValueObjective, supervised_objective
from rl_distill.options import LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3, 5, 9)
RATE, DECAY, EPS, NUM_STEPS = 0.01, 0.1, 1e-3, 3
OPTIONS = LearnerOptions(
    algorithm="muon",
    learning_rate=RATE,
    weight_decay=DECAY,
    eps=EPS,
    clip_grad=0.0,
    micro_batch_tokens=16,
    num_threads=1,
)
LAYOUTS = {
    "tensor": ParallelOptions(ranks=2, tensor=2),
    "pipeline": ParallelOptions(ranks=2, pipeline=2),
}


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def newton_schulz(matrix: Tensor) -> Tensor:
    """X <- aX + b(XX')X + c(XX')^2 X, five times, from the matrix divided by its Frobenius norm."""
    x = matrix / torch.linalg.matrix_norm(matrix)
    for _ in range(5):
        x = 3.4445 * x - 4.775 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def oracle(policy: Path, batch: Batch) -> dict[str, Tensor]:
    """Return the weights after some steps of Muon on the matrices, and of torch's AdamW on the others."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, trust_remote_code=False
    ).double()
    named = dict(model.named_parameters())
    matrices = {name: one for name, one in named.items() if is_matrix(name)}
    momenta = {name: torch.zeros_like(one) for name, one in matrices.items()}
    others = [one for name, one in named.items() if name not in matrices]
    groups = [
        {"params": [one for one in others if one.ndim > 1], "weight_decay": DECAY},
        {"params": [one for one in others if one.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=RATE, eps=EPS)
    for _ in range(NUM_STEPS):
        model.zero_grad()
        for ids, weights in zip(batch.ragged("input_ids"), batch.ragged("loss_weights"), strict=True):
            tokens = torch.from_numpy(ids.astype("int64"))
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(-1, tokens[1:, None])[:, 0]
            (-(torch.from_numpy(weights[1:].astype("float64")) * own).sum()).backward()
        adam.step()
        with torch.no_grad():
            for name, one in matrices.items():
                momenta[name] = 0.95 * momenta[name] + 0.05 * one.grad
                update = newton_schulz(0.95 * momenta[name] + 0.05 * one.grad)
                one.copy_((1 - RATE * DECAY) * one - RATE * 0.2 * math.sqrt(max(one.shape)) * update)
    return {name: one.detach() for name, one in named.items()}


def steps(learner: Any, batch: Batch, count: int = NUM_STEPS) -> dict[str, Tensor]:
    for _ in range(count):
        assert learner.train_step(batch, supervised_objective).is_applied
    return {name: tensor.clone() for name, tensor in learner.export_weights().items()}


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_become_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrix)
    torch.testing.assert_close(found, newton_schulz(matrix), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() < values.max() < 1.25
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ found @ right.T
    torch.testing.assert_close(inside, torch.diag(inside.diag()), rtol=0, atol=1e-12)
    assert not orthogonalized(torch.zeros(shape)).any()


def test_weights_are_those_of_the_definition(tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = make_batch(LENGTHS)
    learner = MegatronLearner(tied_policy, OPTIONS)
    found = steps(learner, batch)
    for name, tensor in oracle(tied_policy, batch).items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    learner.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one(layout: str, two_ranks: Any, tied_policy: Path, make_batch: MakeBatch) -> None:
    batch, parallel = make_batch(LENGTHS), LAYOUTS[layout]
    alone = MegatronLearner(tied_policy, OPTIONS)
    ranks = two_ranks.in_layout(parallel)
    together = MegatronLearner(tied_policy, OPTIONS, ranks=ranks, name="muon")
    found, wanted = steps(together, batch), steps(alone, batch)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    config = parse_policy_config(read_policy_config(tied_policy))
    planned = rank_memory(config, parallel, dtype="float32", algorithm="muon") * (parallel.ranks // parallel.pipeline)
    assert sorted(ranks.call_all(RankHost.run, "muon", "memory", (), {})) == sorted(planned)
    together.close()
    alone.close()


def assert_orthogonal_steps(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check that each matrix moved by a largest singular value near 1 times the scale, or had no gradient."""
    for name in filter(is_matrix, before):
        moved = (after[name] - (1 - RATE * DECAY) * before[name]) / (RATE * 0.2 * math.sqrt(max(before[name].shape)))
        largest = torch.linalg.matrix_norm(moved.double(), 2)
        assert largest < 1e-3 or 0.6 < largest < 1.25, name


def test_each_expert_is_a_matrix(two_ranks: Any, mixture_policy: Path, make_batch: MakeBatch) -> None:
    batch = make_batch(LENGTHS)
    alone = MegatronLearner(mixture_policy, OPTIONS)
    before = {name: tensor.clone() for name, tensor in alone.export_weights().items()}
    wanted = steps(alone, batch, 1)
    assert_orthogonal_steps(before, wanted)
    router = "model.layers.0.mlp.gate.weight"
    moved = (wanted[router] - (1 - RATE * DECAY) * before[router]).abs()
    assert moved.max() <= 1.01 * RATE, "Adam trains the router"
    for parallel in (ParallelOptions(ranks=2, tensor=2, sequence=True), ParallelOptions(ranks=2, expert=2)):
        together = MegatronLearner(mixture_policy, OPTIONS, ranks=two_ranks.in_layout(parallel), name="muon")
        for name, tensor in steps(together, batch, 1).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5)
        together.close()
    alone.close()


def test_a_critic_trains_its_matrices_too(tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = make_batch(LENGTHS)
    batch = batch.with_columns({"returns": batch["advantages"], "values": batch["advantages"]})
    critic = MegatronCritic(tied_policy, OPTIONS)
    before = {name: tensor.clone() for name, tensor in critic.export_weights().items()}
    for _ in range(2):  # the head, at first 0, passes no gradient to the layers
        assert critic.train_step(batch, ValueObjective()).is_applied
    after = critic.export_weights()
    head = next(name for name in before if name.endswith("score.weight"))
    assert 0 < (after[head] - before[head]).abs().max() <= 2.01 * RATE
    name = "model.layers.1.mlp.down_proj.weight"
    values = torch.linalg.svdvals((after[name] - before[name]).double()) / (RATE * 0.2 * math.sqrt(48))
    assert 0.6 < values.max() < 1.3
    critic.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_continues_to_the_bit(
    dtype: Any, tied_policy: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    batch, options = make_batch(LENGTHS), replace(OPTIONS, dtype=dtype)
    learner = MegatronLearner(tied_policy, options)
    steps(learner, batch, 2)
    learner.save(tmp_path / "saved").wait()
    wanted = steps(learner, batch, 1)
    config = parse_policy_config(read_policy_config(tied_policy))
    planned = rank_memory(config, ParallelOptions(), dtype=dtype, algorithm="muon")
    assert learner._ranks.call_all(RankHost.run, learner._name, "memory", (), {}) == planned
    learner.close()
    resumed = MegatronLearner(tied_policy, options)
    resumed.load(tmp_path / "saved")
    assert different_tensors(wanted, steps(resumed, batch, 1)) == []
    assert resumed._ranks.call_all(RankHost.run, resumed._name, "memory", (), {}) == planned
    resumed.close()
    other = MegatronLearner(tied_policy, replace(options, algorithm="adam"))
    with pytest.raises(CheckpointError, match="saved with algorithm = 'muon'; this learner has 'adam'"):
        other.load(tmp_path / "saved")
    other.close()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"ranks": ParallelOptions(ranks=2, distributed_optimizer=True)}, "parallel.distributed_optimizer = true"),
        ({"lora": LoraOptions(rank=2)}, "trains no adapters; found lora.rank = 2"),
        ({"backend": "transformers"}, "is computed by transformers' class"),
    ],
)
def test_what_it_does_not_train_is_refused(
    changes: dict[str, Any], wanted: str, two_ranks: Any, tied_policy: Path
) -> None:
    if "ranks" in changes:
        changes = {"ranks": two_ranks.in_layout(changes["ranks"])}
    with pytest.raises(SettingsError, match=wanted):
        MegatronLearner(tied_policy, OPTIONS, **changes)
