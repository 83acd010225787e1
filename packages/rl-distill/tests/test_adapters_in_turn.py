"""Adapters that train in turn over one base: each has the bits that it would have alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.errors import NotReadyError, SettingsError
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.learner import FIRST_ADAPTER
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import AdamOptions, LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
Started = Any  # `Started` of conftest.py
LENGTHS = (7, 3, 12, 5, 1, 9, 4)
OPTIONS = LearnerOptions(learning_rate=1e-2, weight_decay=0.1, micro_batch_tokens=24, num_threads=1, warmup_steps=3)
LORA = LoraOptions(rank=2, dropout=0.2)
OVERLAPPING = replace(OPTIONS, overlap_grad_reduce=True, overlap_param_gather=True)
CASES: dict[str, tuple[ParallelOptions, LearnerOptions]] = {
    "one": (ParallelOptions(), OPTIONS),
    "one bfloat16": (ParallelOptions(), replace(OPTIONS, dtype="bfloat16", offload_optimizer=True)),
    "data": (ParallelOptions(ranks=2), OPTIONS),
    "tensor": (ParallelOptions(ranks=2, tensor=2), replace(OPTIONS, dtype="bfloat16")),
    "distributed optimizer": (ParallelOptions(ranks=2, distributed_optimizer=True), OVERLAPPING),
    "distributed bfloat16": (
        ParallelOptions(ranks=2, distributed_optimizer=True),
        replace(OVERLAPPING, dtype="bfloat16"),
    ),
}
SEEDS = {FIRST_ADAPTER: 0, "second": 5, "third": 9}


@pytest.fixture
def build(tied_policy: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., MegatronLearner]]:
    learners: list[MegatronLearner] = []
    ranks: list[Any] = []

    def learner_of(case: str, name: str, *, lora: LoraOptions = LORA, **changes: Any) -> MegatronLearner:
        layout, options = CASES[case]
        if not ranks:
            ranks.append(None if layout.ranks == 1 else request.getfixturevalue("two_ranks").in_layout(layout))
        learners.append(MegatronLearner(tied_policy, replace(options, **changes), ranks=ranks[0], name=name, lora=lora))
        return learners[-1]

    yield learner_of
    for learner in learners:
        learner.close()


def operations(client: int, make_batch: MakeBatch) -> Iterator[Callable[[MegatronLearner], Any]]:
    """Yield the requests of a client, each of which returns what it measured."""
    batches = [make_batch(LENGTHS, seed=10 * client + number) for number in range(4)]

    def adds(number: int) -> Callable[[MegatronLearner], Any]:
        def add(learner: MegatronLearner) -> Any:
            result = learner.forward_backward(batches[number], supervised_objective, with_tokens=True)
            return result.loss, result.metrics, result.tokens["policy_logprobs"].values.tolist()

        return add

    yield adds(0)
    yield adds(1)
    yield lambda learner: learner.optim_step()
    yield lambda learner: learner.logprobs(batches[2]).values.tolist()
    yield lambda learner: learner.optim_step()
    yield adds(2)
    yield lambda learner: learner.optim_step(AdamOptions(learning_rate=0.01 * client, betas=(0.8, 0.9)))
    yield lambda learner: learner.train_step(batches[3], supervised_objective).grad_norm


def contents(learner: MegatronLearner, directory: Path) -> dict[str, Tensor]:
    """Return what a checkpoint of the selected adapter holds."""
    learner.save(directory)
    folder = TensorFolder(directory / "state")
    pieces = [
        Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.zeros(shape))
        for name, shape in folder.shapes().items()
    ]
    folder.read(pieces)
    return {piece.name: piece.tensor for piece in pieces}


def select(learner: MegatronLearner, name: str, known: set[str]) -> None:
    if name in known:
        learner.select_adapter(name)
    else:
        learner.add_adapter(name, seed=SEEDS[name])
    known.add(name)


@pytest.mark.parametrize("case", CASES)
def test_each_is_as_if_alone(case: str, build: Any, make_batch: MakeBatch, tmp_path: Path):
    names = list(SEEDS)[: 3 if case == "one" else 2]
    alone: dict[str, tuple[list[Any], dict[str, Tensor]]] = {}
    for client, name in enumerate(names, 1):
        learner = build(case, f"alone-{client}")
        select(learner, name, {FIRST_ADAPTER})
        found = [operation(learner) for operation in operations(client, make_batch)]
        alone[name] = found, contents(learner, tmp_path / f"alone-{client}")
        assert learner.step == 4

    together, known = build(case, "together"), {FIRST_ADAPTER}
    measured: dict[str, list[Any]] = {name: [] for name in names}
    requests = [list(operations(client, make_batch)) for client in range(1, len(names) + 1)]
    for of_clients in zip(*requests, strict=True):
        for name, operation in zip(names, of_clients, strict=True):
            select(together, name, known)
            measured[name].append(operation(together))
    for client, name in enumerate(names, 1):
        together.select_adapter(name)
        found, state = alone[name]
        assert (together.step, together.adapter) == (4, name)
        assert measured[name] == found
        stored = contents(together, tmp_path / f"together-{client}")
        assert [one for one, tensor in state.items() if not torch.equal(stored[one], tensor)] == []


def test_a_new_adapter_is_the_first_of_a_learner_with_its_seed(build: Any, make_batch: MakeBatch):
    learner, other = build("one", "learner"), build("one", "other", seed=5)
    learner.train_step(make_batch(LENGTHS), supervised_objective)
    learner.add_adapter("second", seed=5)
    assert learner.step == 0
    wanted = other.export_adapter()
    for name, tensor in learner.export_adapter().items():
        assert torch.equal(tensor, wanted[name]), name
    learner.add_adapter("third")
    assert not torch.equal(next(iter(learner.export_adapter().values())), next(iter(wanted.values())))


def test_a_lower_rank_trains_as_a_learner_of_that_rank(
    build: Any, make_batch: MakeBatch, tied_policy: Path, tmp_path: Path
):
    wide = LoraOptions(rank=6, alpha=8.0, rslora=True)
    learner, narrow = build("one", "wide", lora=wide), build("one", "narrow", lora=replace(wide, rank=2))
    learner.train_step(make_batch(LENGTHS, seed=3), supervised_objective)
    learner.add_adapter("narrow", rank=2)
    for seed in range(3):
        learner.select_adapter(FIRST_ADAPTER)
        learner.select_adapter("narrow")
        found, wanted = (
            one.train_step(make_batch(LENGTHS, seed=seed), supervised_objective) for one in (learner, narrow)
        )
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    small = narrow.export_adapter()
    for name, tensor in learner.export_adapter().items():
        within = tensor[:2] if "lora_A" in name else tensor[:, :2]
        torch.testing.assert_close(within, small[name], rtol=1e-3, atol=1e-4)
        assert tensor.count_nonzero() == within.count_nonzero()
    batch = make_batch(LENGTHS, seed=7)
    before = learner.logprobs(batch).values
    learner.save(tmp_path / "saved")
    resumed = build(
        "one", "resumed", lora=replace(wide, path=tmp_path / "saved" / "adapter", alpha=learner._lora.alpha)
    )
    np.testing.assert_allclose(resumed.logprobs(batch).values, before, rtol=0, atol=1e-5)
    learner.train_step(batch, supervised_objective)
    learner.load(tmp_path / "saved")
    assert learner.logprobs(batch).values.tolist() == before.tolist()
    with pytest.raises(SettingsError, match="the rank of adapter 'wider' must be from 1 to 6; found 7"):
        learner.add_adapter("wider", rank=7)


@pytest.mark.parametrize("case", ["one", "tensor"])
def test_an_adapter_may_leave_matrices_alone(case: str, build: Any, make_batch: MakeBatch):
    learner = build(case, "learner")
    learner.add_adapter("second", frozen=["*.mlp.*"])
    for seed in range(3):
        learner.train_step(make_batch(LENGTHS, seed=seed), supervised_objective)
    for name, tensor in learner.export_adapter().items():
        assert bool(tensor.any()) == (".mlp." not in name), name


def test_weights_load_without_their_optimizer(build: Any, make_batch: MakeBatch, tmp_path: Path):
    learner, batch = build("one", "learner", warmup_steps=0), make_batch(LENGTHS)
    learner.train_step(batch, supervised_objective)
    learner.save(tmp_path / "first")
    saved = {name: tensor.clone() for name, tensor in learner.export_adapter().items()}
    learner.add_adapter("second")
    learner.load(tmp_path / "first", with_optimizer=False)
    assert learner.step == 0
    assert different_tensors(saved, learner.export_adapter()) == []
    anew = learner.train_step(batch, supervised_objective), contents(learner, tmp_path / "anew")
    learner.load(tmp_path / "first")
    continued = learner.train_step(batch, supervised_objective), contents(learner, tmp_path / "continued")
    assert (anew[0].step, continued[0].step) == (1, 2)
    assert any(not torch.equal(tensor, continued[1][name]) for name, tensor in anew[1].items())


def test_waiting_gradients_belong_to_their_adapter(build: Any, make_batch: MakeBatch, tmp_path: Path):
    learner, batch = build("one", "learner"), make_batch(LENGTHS)
    learner.forward_backward(batch, supervised_objective)
    learner.add_adapter("second")
    learner.save(tmp_path / "second")
    learner.train_step(batch, supervised_objective)
    learner.offload()
    learner.select_adapter(FIRST_ADAPTER)
    with pytest.raises(NotReadyError, match="gradients of 1 forward_backward calls wait"):
        learner.load(tmp_path / "second")
    assert learner.optim_step().grad_norm > 0
    learner.select_adapter("second")
    learner.load(tmp_path / "second")
    assert learner.step == 0
    learner.select_adapter(FIRST_ADAPTER)
    assert learner.step == 1


def test_names_of_adapters_are_checked(build: Any, make_batch: MakeBatch):
    learner = build("one", "learner")
    learner.add_adapter("second")
    for taken in ("second", FIRST_ADAPTER):
        with pytest.raises(SettingsError, match=f"there is already an adapter '{taken}'"):
            learner.add_adapter(taken)
    with pytest.raises(SettingsError, match="no adapter 'third' waits; 'second' is selected, and these wait: default"):
        learner.select_adapter("third")
    with pytest.raises(SettingsError, match="no adapter 'second' waits"):
        learner.drop_adapter("second")
    learner.select_adapter("second")
    learner.drop_adapter(FIRST_ADAPTER)
    with pytest.raises(SettingsError, match="these wait: none"):
        learner.select_adapter(FIRST_ADAPTER)
    learner.add_adapter(FIRST_ADAPTER)
    assert np.isfinite(learner.train_step(make_batch(LENGTHS), supervised_objective).loss)
    with pytest.raises(NotReadyError, match="has no adapter"):
        build("one", "whole", lora=LoraOptions()).add_adapter("second")
