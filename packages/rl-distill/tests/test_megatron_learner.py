"""The Megatron learner compared with the reference learner, and with itself under every packing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from equal_tensors import different_tensors
from rounding import rounding_bound
from torch_learner import TorchLearner

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError, NotReadyError, SettingsError, ShapeError
from rl_distill.checkpoints.pieces import Piece, TensorFolder
from rl_distill.learner import LearnerOptions, MetricSums, MicroBatch
from rl_distill.megatron import head
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12)
OPTIONS = LearnerOptions(learning_rate=1e-3, weight_decay=0.1, micro_batch_tokens=64, num_threads=1, eps=1e-6)


def policy_gradient(
    logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
) -> tuple[torch.Tensor, MetricSums]:
    weights, mask = micro.columns["loss_weights"], micro.columns["loss_mask"]
    loss = -(logprobs.exp() * micro.columns["advantages"] * weights).sum()
    sums = {"trained": (mask.float().sum(), torch.tensor(1.0))}
    if entropy is not None:
        loss = loss - 0.1 * (entropy * weights).sum()
        sums["entropy"] = ((entropy.detach() * mask).sum(), mask.sum())
    return loss, sums


def saved_tensors(learner: MegatronLearner, directory: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return a kind of tensors in a checkpoint: "weights", "exp_avg" or "exp_avg_sq"."""
    learner.save(directory)
    folder = TensorFolder(directory / "state")
    pieces = [
        Piece(name=name, shape=shape, offsets=(0,) * len(shape), tensor=torch.empty(shape))
        for name, shape in folder.shapes().items()
        if name.startswith(kind + "/")
    ]
    folder.read(pieces)
    return {piece.name: piece.tensor for piece in pieces}


@pytest.mark.parametrize("policy", ["tied_policy", "untied_policy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_references(
    policy: str, temperature: float, make_batch: MakeBatch, request: pytest.FixtureRequest
):
    policy_dir = request.getfixturevalue(policy)
    batch = make_batch(LENGTHS)

    found = MegatronLearner(policy_dir, OPTIONS).logprobs(batch, temperature=temperature)
    expected = TorchLearner(policy_dir, OPTIONS).logprobs(batch, temperature=temperature)

    assert np.array_equal(found.offsets, batch.ragged("input_ids").offsets)
    assert [row[0] for row in found] == [0.0] * len(LENGTHS)
    np.testing.assert_allclose(found.values, expected.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["tied_policy", "untied_policy"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_three_steps_are_the_references(
    policy: str, with_entropy: bool, make_batch: MakeBatch, request: pytest.FixtureRequest
):
    policy_dir = request.getfixturevalue(policy)
    learners = [kind(policy_dir, OPTIONS) for kind in (MegatronLearner, TorchLearner)]
    for step, tolerance in ((1, rounding_bound(1.0)), (2, 1e-5), (3, 1e-5)):  # the loss's terms add up to less than 1
        batch = make_batch(LENGTHS, seed=step)
        found, expected = (
            learner.train_step(batch, policy_gradient, temperature=0.8, with_entropy=with_entropy)
            for learner in learners
        )
        assert found.step == expected.step == step
        assert found.loss == pytest.approx(expected.loss, rel=0, abs=tolerance)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance, abs=tolerance)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
    weights = learners[0].export_weights()
    for name, tensor in learners[1].export_weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_step_gives_the_tokens_that_it_trained_as_they_were_before_it(
    with_entropy: bool, tied_policy: Path, make_batch: MakeBatch
):
    batch = make_batch(LENGTHS)
    mask = batch.ragged("loss_mask").values
    options = replace(OPTIONS, micro_batch_tokens=13)
    learners = [MegatronLearner(tied_policy, options), TorchLearner(tied_policy, options)]
    before = learners[0].logprobs(batch, temperature=0.8).values
    found, expected = (
        learner.train_step(batch, policy_gradient, temperature=0.8, with_entropy=with_entropy, with_tokens=True).tokens
        for learner in learners
    )
    np.testing.assert_allclose(found["policy_logprobs"].values, before * mask, rtol=0, atol=2e-6)
    assert not np.array_equal(learners[0].logprobs(batch, temperature=0.8).values * mask, before * mask)
    for name in ("policy_logprobs", "entropy"):
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=0, atol=1e-5)
        assert np.array_equal(found[name].offsets, batch.ragged("input_ids").offsets)
    first_of_row = batch.ragged("input_ids").offsets[:-1]
    scored = mask.copy()
    scored[first_of_row] = False
    assert (found["entropy"].values[scored] > 0).all()
    assert not found["entropy"].values[~mask].any()


@pytest.mark.parametrize("micro_batch_tokens", [1, 13, 30])
def test_a_step_does_not_depend_on_the_micro_batches(
    micro_batch_tokens: int, tied_policy: Path, make_batch: MakeBatch, tmp_path: Path
):
    batch = make_batch(LENGTHS)
    options = replace(OPTIONS, micro_batch_tokens=micro_batch_tokens)

    whole = MegatronLearner(tied_policy, OPTIONS)
    cut = MegatronLearner(tied_policy, options)
    np.testing.assert_allclose(cut.logprobs(batch).values, whole.logprobs(batch).values, rtol=0, atol=2e-6)
    expected = whole.train_step(batch, supervised_objective)
    found = cut.train_step(batch, supervised_objective)

    assert found.loss == pytest.approx(expected.loss, rel=rounding_bound(1.0))
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rounding_bound(1.0))
    assert found.metrics == pytest.approx(expected.metrics, rel=rounding_bound(1.0))
    moments = [saved_tensors(learner, tmp_path / name, "exp_avg") for learner, name in ((whole, "whole"), (cut, "cut"))]
    for name, moment in moments[0].items():
        bound = rounding_bound(float(moment.abs().max()))
        torch.testing.assert_close(moments[1][name], moment, rtol=0, atol=bound)


def test_logits_in_chunks_change_nothing(tied_policy: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch):
    batch = make_batch(LENGTHS)
    expected = MegatronLearner(tied_policy, OPTIONS).train_step(batch, policy_gradient, with_entropy=True)
    monkeypatch.setattr(head, "KEPT_LOGITS", 40 * 5)

    found = MegatronLearner(tied_policy, OPTIONS).train_step(batch, policy_gradient, with_entropy=True)

    assert found.loss == pytest.approx(expected.loss, rel=rounding_bound(1.0))
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rounding_bound(1.0))


def test_recomputed_layers_see_the_same_pack(tied_policy: Path, make_batch: MakeBatch):
    batch = make_batch(LENGTHS)
    options = replace(OPTIONS, micro_batch_tokens=20)
    expected = MegatronLearner(tied_policy, options).train_step(batch, supervised_objective)

    found = MegatronLearner(tied_policy, replace(options, recompute="full")).train_step(batch, supervised_objective)

    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rounding_bound(1.0))


def test_supervised_learning_learns_a_batch(tied_policy: Path, make_batch: MakeBatch):
    learner = MegatronLearner(tied_policy, replace(OPTIONS, learning_rate=2e-2, warmup_steps=3))
    batch = make_batch(LENGTHS)

    results = [learner.train_step(batch, supervised_objective) for _ in range(12)]

    assert results[-1].loss < 0.3 * results[0].loss
    assert [round(result.learning_rate, 6) for result in results[:4]] == [0.006667, 0.013333, 0.02, 0.02]
    assert results[0].metrics["nll"] == pytest.approx(results[0].loss, rel=1e-5)
    assert learner.step == 12


def test_temperature_divides_the_logits(tied_policy: Path, make_batch: MakeBatch):
    learner = MegatronLearner(tied_policy, OPTIONS)
    batch = make_batch((5,))

    hot = learner.logprobs(batch, temperature=1e6)

    np.testing.assert_allclose(hot.values[1:], -np.log(40), atol=1e-4)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_step_that_is_not_finite_leaves_the_weights_alone(poison: float, tied_policy: Path, make_batch: MakeBatch):
    learner = MegatronLearner(tied_policy, OPTIONS)
    batch = make_batch(LENGTHS)
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    values = batch.ragged("advantages").values.copy()
    values[-1] = poison
    bad = batch.with_columns({"advantages": Ragged(values, batch.ragged("advantages").offsets)})

    skipped = learner.train_step(bad, policy_gradient)

    assert not skipped.is_applied
    assert skipped.broken_rows == (len(LENGTHS) - 1,)
    assert skipped.step == learner.step == 0
    assert different_tensors(before, learner.export_weights()) == []
    fresh = MegatronLearner(tied_policy, OPTIONS)
    assert learner.train_step(batch, policy_gradient) == fresh.train_step(batch, policy_gradient)


def test_gradients_that_are_not_finite_leave_the_weights_alone(tied_policy: Path, make_batch: MakeBatch):
    def no_gradient_at_zero(
        logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch
    ) -> tuple[torch.Tensor, MetricSums]:
        return (logprobs - logprobs.detach()).square().sqrt().sum(), {}

    learner = MegatronLearner(tied_policy, OPTIONS)
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}

    skipped = learner.train_step(make_batch(LENGTHS), no_gradient_at_zero)

    assert not skipped.is_applied
    assert np.isfinite(skipped.loss)
    assert not np.isfinite(skipped.grad_norm)
    assert different_tensors(before, learner.export_weights()) == []


def test_a_batch_without_weights_is_refused(tied_policy: Path, make_batch: MakeBatch):
    learner = MegatronLearner(tied_policy, OPTIONS)
    batch = make_batch(LENGTHS)
    weights = batch.ragged("loss_weights")
    none = batch.with_columns({"loss_weights": Ragged(np.zeros_like(weights.values), weights.offsets)})
    missing = Batch(batch.keys, {"input_ids": batch["input_ids"]})

    with pytest.raises(ShapeError, match="all loss_weights are 0"):
        learner.train_step(none, supervised_objective)
    with pytest.raises(ShapeError, match="needs the column 'loss_weights'"):
        learner.train_step(missing, supervised_objective)


def test_exported_weights_are_the_folders(tied_policy: Path, untied_policy: Path):
    for policy_dir in (tied_policy, untied_policy):
        expected = TorchLearner(policy_dir, OPTIONS)
        learner = MegatronLearner(policy_dir, OPTIONS)
        found = learner.export_weights()
        assert found.keys() == expected.export_weights().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.export_weights().items())
        assert learner.tied == expected.tied
        assert learner.num_parameters == expected.num_parameters
    assert MegatronLearner(tied_policy, OPTIONS).tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_random_weights_depend_on_the_seed_alone_and_disturb_nobody(tied_policy: Path):
    config = {**TorchLearner(tied_policy, OPTIONS)._source.config_json}
    torch.manual_seed(5)
    state = torch.get_rng_state()

    first, again, other = (MegatronLearner(config, replace(OPTIONS, seed=seed)).export_weights() for seed in (1, 1, 2))

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert float(first["model.embed_tokens.weight"].std()) == pytest.approx(0.15, rel=0.1)


def test_bfloat16_learns_with_float32_masters(tied_policy: Path, make_batch: MakeBatch):
    options = replace(OPTIONS, dtype="bfloat16", learning_rate=1e-4)
    learners = [kind(tied_policy, options) for kind in (MegatronLearner, TorchLearner)]
    batch = make_batch(LENGTHS)

    found, expected = ([learner.train_step(batch, supervised_objective) for _ in range(4)] for learner in learners)

    assert {tensor.dtype for tensor in learners[0].export_weights().values()} == {torch.bfloat16}
    assert found[-1].loss < found[0].loss
    assert found[-1].loss == pytest.approx(expected[-1].loss, rel=0.02)
    assert found[-1].grad_norm == pytest.approx(expected[-1].grad_norm, rel=0.05)


def test_unsupported_policies_are_refused_by_name(tied_policy: Path, tmp_path: Path):
    config = TorchLearner(tied_policy, OPTIONS)._source.config_json

    with pytest.raises(
        SettingsError, match=r"GPT2LMHeadModel is not computed by our layers, which have Qwen3ForCausal"
    ):
        MegatronLearner({**config, "architectures": ["GPT2LMHeadModel"]}, OPTIONS, backend="megatron")
    yarn = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}
    with pytest.raises(SettingsError, match=r"rope_type .yarn. is not supported"):
        MegatronLearner({**config, **yarn}, OPTIONS, backend="megatron")
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        MegatronLearner(tmp_path, OPTIONS)
    with pytest.raises(SettingsError, match="dtype of LearnerOptions must be one of"):
        MegatronLearner(tied_policy, replace(OPTIONS, dtype="float16"))


def test_a_closed_learner_says_so(tied_policy: Path, make_batch: MakeBatch):
    learner = MegatronLearner(tied_policy, OPTIONS)
    learner.close()
    learner.close()

    with pytest.raises(NotReadyError, match="the learner was closed"):
        learner.logprobs(make_batch(LENGTHS))
