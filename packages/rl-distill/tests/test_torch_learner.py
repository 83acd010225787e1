"""The reference learner compared with plain transformers and torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rounding import rounding_bound
from torch_learner import TorchLearner
from transformers import Qwen3ForCausalLM

from rl_core.data.batch import Batch
from rl_distill.learner import LearnerOptions
from rl_distill.objectives import supervised_objective

MakeBatch = Callable[..., Batch]


def test_logprobs_are_those_of_each_row_alone(tied_policy: Path, make_batch: MakeBatch):
    batch = make_batch((6, 2, 9, 1))
    learner = TorchLearner(tied_policy, LearnerOptions(micro_batch_tokens=8))
    model = Qwen3ForCausalLM.from_pretrained(tied_policy)

    found = learner.logprobs(batch)

    for ids, row in zip(batch.ragged("input_ids"), found, strict=True):
        tokens = torch.from_numpy(ids.astype("int64"))
        distribution = model(tokens[None]).logits[0].log_softmax(-1)
        expected = distribution[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        torch.testing.assert_close(torch.from_numpy(row[1:].copy()), expected.detach(), rtol=0, atol=1e-5)
        assert row[0] == 0.0


def test_first_step_moves_by_the_learning_rate_against_the_gradient(tied_policy: Path, make_batch: MakeBatch):
    learner = TorchLearner(tied_policy, LearnerOptions(learning_rate=1e-3, weight_decay=0.0, eps=1e-12))
    name = "model.layers.0.mlp.up_proj.weight"
    before = learner.export_weights()[name].clone()

    result = learner.train_step(make_batch((6, 2, 9)), supervised_objective)

    # Adam's first step is learning_rate * sign(gradient).
    moved = (learner.export_weights()[name] - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-2, atol=0)
    assert result.loss == pytest.approx(result.metrics["nll"], rel=rounding_bound(1.0))


def test_weight_decay_spares_the_norms(tied_policy: Path, make_batch: MakeBatch):
    batch = make_batch((6, 2, 9))
    plain, decayed = (
        TorchLearner(tied_policy, LearnerOptions(learning_rate=1e-3, weight_decay=decay)) for decay in (0.0, 0.5)
    )
    before = plain.export_weights()["model.layers.0.mlp.up_proj.weight"].clone()

    for learner in (plain, decayed):
        learner.train_step(batch, supervised_objective)

    left, right = plain.export_weights(), decayed.export_weights()
    assert torch.equal(left["model.norm.weight"], right["model.norm.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(left[name] - right[name], 1e-3 * 0.5 * before, rtol=1e-3, atol=1e-7)
