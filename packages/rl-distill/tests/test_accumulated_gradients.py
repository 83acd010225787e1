"""`forward_backward` and `optim_step`: `train_step` in two parts, whose gradients can come from several batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding_bound
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import NotReadyError, SettingsError, ShapeError
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_distill.options import AdamOptions, LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
Started = Any  # `Started` of conftest.py
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
OPTIONS = LearnerOptions(
    learning_rate=1e-2, betas=(0.8, 0.9), weight_decay=0.1, clip_grad=0.5, micro_batch_tokens=24, num_threads=1
)
OVERLAPPING = replace(OPTIONS, overlap_grad_reduce=True, overlap_param_gather=True)
DROPPING = LoraOptions(rank=2, dropout=0.2)
CASES: dict[str, tuple[ParallelOptions, LearnerOptions, LoraOptions]] = {
    "one": (ParallelOptions(), OPTIONS, LoraOptions()),
    "one adapter": (ParallelOptions(), OPTIONS, DROPPING),
    "data": (ParallelOptions(ranks=2), OPTIONS, LoraOptions()),
    "overlapping": (ParallelOptions(ranks=2), replace(OPTIONS, overlap_grad_reduce=True), LoraOptions(rank=2)),
    "tensor": (ParallelOptions(ranks=2, tensor=2), replace(OPTIONS, dtype="bfloat16"), DROPPING),
    "pipeline": (ParallelOptions(ranks=2, pipeline=2), OPTIONS, LoraOptions()),
    "distributed optimizer": (ParallelOptions(ranks=2, distributed_optimizer=True), OVERLAPPING, LoraOptions()),
    "divided weights": (ParallelOptions(ranks=2, shard_weights=True), OPTIONS, LoraOptions()),
}


@pytest.fixture
def build(tied_policy: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], MegatronLearner]]:
    learners: list[MegatronLearner] = []
    started: dict[str, Any] = {"one": None, "one adapter": None}

    def learner_of(case: str, name: str, **changes: Any) -> MegatronLearner:
        layout, options, lora = CASES[case]
        if case not in started:
            started[case] = request.getfixturevalue("two_ranks").in_layout(layout)
        backend = "transformers" if layout.shard_weights else "auto"
        options = replace(options, **changes)
        ranks = started[case]
        learners.append(MegatronLearner(tied_policy, options, ranks=ranks, name=name, lora=lora, backend=backend))
        return learners[-1]

    yield learner_of
    for learner in learners:
        learner.close()


def trained(learner: MegatronLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.export_weights().items()}


def assert_same_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def with_weights(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    weights = batch.ragged("loss_weights")
    return batch.with_columns({"loss_weights": Ragged(change(weights.values.copy()), weights.offsets)})


class Failing:
    """An objective that fails at its second micro-batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the second micro-batch fails")
        return supervised_objective(logprobs, entropy, micro)


def with_wrong_sums(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, MetricSums]:
    """An objective whose metrics fail after the backward pass."""
    return supervised_objective(logprobs, entropy, micro)[0], {"wrong": (torch.ones(2), torch.ones(()))}


@pytest.mark.parametrize("case", CASES)
def test_a_train_step_is_both_parts(case: str, build: Any, make_batch: MakeBatch):
    whole, parts = build(case, "whole"), build(case, "parts")
    for seed in range(3):
        batch = make_batch(LENGTHS, seed=seed)
        wanted = whole.train_step(batch, supervised_objective, with_entropy=True, with_tokens=True)
        found = parts.forward_backward(batch, supervised_objective, with_entropy=True, with_tokens=True)
        stepped = parts.optim_step()
        assert (found.loss, found.metrics, found.computed_tokens) == (
            wanted.loss,
            wanted.metrics,
            wanted.computed_tokens,
        )
        for name, column in wanted.tokens.items():
            assert found.tokens[name].values.tolist() == column.values.tolist()
        assert (stepped.step, stepped.grad_norm, stepped.learning_rate, stepped.is_applied) == (
            wanted.step,
            wanted.grad_norm,
            wanted.learning_rate,
            wanted.is_applied,
        )
        assert parts.step == whole.step == seed + 1
    assert_same_bits(trained(parts), trained(whole))


@pytest.mark.parametrize("case", ["one", "data", "overlapping", "pipeline", "distributed optimizer", "divided weights"])
def test_gradients_of_batches_add_up(case: str, build: Any, make_batch: MakeBatch):
    """On data-parallel ranks too, where sums of gradients must not be summed over the ranks again."""
    changes = {"clip_grad": 0.0}
    whole, parts = build(case, "whole", **changes), build(case, "parts", **changes)
    batch = make_batch((7, 3, 12, 5, 9, 4))
    for _ in range(2):
        wanted = whole.train_step(batch, supervised_objective)
        losses = [
            parts.forward_backward(batch.select(np.array(rows)), supervised_objective).loss
            for rows in ((0, 3), (1,), (2, 4, 5))
        ]
        stepped = parts.optim_step()
        assert sum(losses) == pytest.approx(wanted.loss, rel=1e-5)
        assert stepped.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def test_each_batch_of_a_step_drops_other_units(build: Any, make_batch: MakeBatch):
    learner, batch = build("one adapter", "dropping"), make_batch(LENGTHS)
    learner.train_step(batch, supervised_objective)  # B starts at 0
    first, second = (learner.forward_backward(batch, supervised_objective).loss for _ in range(2))
    learner.zero_grad()
    assert first != second
    assert learner.forward_backward(batch, supervised_objective).loss == first


def test_settings_of_a_step_are_those_of_a_learner(build: Any, make_batch: MakeBatch):
    other = AdamOptions(learning_rate=3e-3, betas=(0.5, 0.7), eps=1e-6, weight_decay=0.3, clip_grad=0.2)
    names = ("learning_rate", "betas", "eps", "weight_decay", "clip_grad")
    wanted = build("one", "wanted", **{name: getattr(other, name) for name in names})
    found = build("one", "found")
    for seed in range(2):
        batch = make_batch(LENGTHS, seed=seed)
        wanted.train_step(batch, supervised_objective)
        found.forward_backward(batch, supervised_objective)
        assert found.optim_step(other).learning_rate == 3e-3
    assert_same_bits(trained(found), trained(wanted))
    with pytest.raises(SettingsError, match="betas"):
        AdamOptions(learning_rate=1e-3, betas=(0.9, 1.0))


@pytest.mark.parametrize("case", ["one", "distributed optimizer"])
def test_a_step_without_gradients_moves_by_the_momentum(case: str, build: Any, make_batch: MakeBatch):
    """A zero gradient, as a batch without weights gives; no rank keeps weights of the step before."""
    learner, other = build(case, "learner"), build(case, "other")
    batch = make_batch(LENGTHS)
    for each in (learner, other):
        each.train_step(batch, supervised_objective)
    before = trained(learner)
    result = learner.optim_step()
    other.forward_backward(with_weights(batch, np.zeros_like), supervised_objective)
    other.optim_step()
    assert (result.step, result.grad_norm, result.is_applied) == (2, 0.0, True)
    expected = learner.logprobs(batch).values
    assert expected.tolist() == other.logprobs(batch).values.tolist()
    after = trained(learner)
    assert_same_bits(after, trained(other))
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_an_error_keeps_the_earlier_gradients_alone(build: Any, make_batch: MakeBatch):
    first, second = make_batch(LENGTHS), make_batch(LENGTHS, seed=1)
    wanted, found = build("one", "wanted"), build("one", "found")
    with pytest.raises(RuntimeError, match="second micro-batch"):
        found.forward_backward(first, Failing())
    for learner in (wanted, found):
        learner.forward_backward(first, supervised_objective)
    with pytest.raises(RuntimeError, match="second micro-batch"):
        found.forward_backward(second, Failing())
    with pytest.raises(RuntimeError, match="size"):
        found.forward_backward(second, with_wrong_sums)
    for learner in (wanted, found):
        learner.forward_backward(second, supervised_objective)
    assert found.optim_step() == wanted.optim_step()
    assert_same_bits(trained(found), trained(wanted))


@pytest.mark.parametrize("case", ["one", "data", "divided weights"])
def test_discarded_gradients_leave_nothing(case: str, build: Any, make_batch: MakeBatch):
    first, second = make_batch(LENGTHS), make_batch(LENGTHS, seed=1)
    wanted, found = build(case, "wanted"), build(case, "found")
    found.forward_backward(second, supervised_objective)
    found.zero_grad()
    for learner in (wanted, found):
        learner.train_step(first, supervised_objective)
    assert_same_bits(trained(found), trained(wanted))


@pytest.mark.parametrize("case", ["one", "data"])
def test_a_batch_that_is_not_finite_skips_the_step(case: str, build: Any, make_batch: MakeBatch):
    learner, batch = build(case, "learner"), make_batch(LENGTHS)
    before = trained(learner)

    def poison(values: Any) -> Any:
        values[5] = np.nan
        return values

    broken = learner.forward_backward(with_weights(batch, poison), supervised_objective)
    learner.forward_backward(batch, supervised_objective)
    result = learner.optim_step()
    assert broken.broken_rows == (0,)
    assert (result.step, result.is_applied, learner.step) == (0, False, 0)
    assert np.isnan(result.grad_norm)
    assert_same_bits(trained(learner), before)
    assert learner.train_step(batch, supervised_objective).is_applied


def test_waiting_gradients_are_not_mixed_or_lost(build: Any, make_batch: MakeBatch, tmp_path: Path):
    learner, batch = build("one", "learner"), make_batch(LENGTHS)
    learner.save(tmp_path / "saved")
    learner.forward_backward(batch, supervised_objective)
    learner.forward_backward(batch, supervised_objective)
    refused = "the gradients of 2 forward_backward calls wait"
    with pytest.raises(NotReadyError, match=refused):
        learner.train_step(batch, supervised_objective)
    with pytest.raises(NotReadyError, match=refused):
        learner.load(tmp_path / "saved")
    learner.offload()
    learner.save(tmp_path / "while-waiting")
    kept = learner.optim_step().grad_norm
    learner.load(tmp_path / "saved")
    once = learner.train_step(batch, supervised_objective).grad_norm
    assert kept == pytest.approx(2 * once, rel=rounding_bound(1.0))
    learner.load(tmp_path / "while-waiting")
    assert learner.train_step(batch, supervised_objective).grad_norm == once


@pytest.mark.parametrize("case", ["one", "data"])
def test_a_batch_without_weights_adds_nothing(case: str, build: Any, make_batch: MakeBatch):
    batch = make_batch(LENGTHS)
    wanted, found = build(case, "wanted"), build(case, "found")
    mask = batch.ragged("loss_mask")
    nothing = with_weights(batch, np.zeros_like)
    for learner in (wanted, found):
        learner.forward_backward(batch, supervised_objective)
    untrained = nothing.with_columns({"loss_mask": Ragged(np.zeros_like(mask.values), mask.offsets)})
    for empty in (nothing, untrained):
        assert found.forward_backward(empty, supervised_objective).loss == 0.0
    assert found.optim_step() == wanted.optim_step()
    assert_same_bits(trained(found), trained(wanted))
    with pytest.raises(ShapeError, match="forward_backward needs the column 'loss_weights'"):
        found.forward_backward(batch.only({"input_ids"}), supervised_objective)
