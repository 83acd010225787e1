"""The column `target_ids`: several targets for each token, compared with log_softmax of transformers' logits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from equal_tensors import different_tensors
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import tinker_objective
from rl_distill.options import AdamOptions, LearnerOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3, 5, 1, 9)
NUM_TARGETS, VOCAB = 3, 40
OPTIONS = LearnerOptions(micro_batch_tokens=16, num_threads=1)
SCALE = 1e9
AS_GRADIENT = AdamOptions(learning_rate=SCALE, betas=(0.0, 0.0), eps=SCALE, weight_decay=0.0, clip_grad=0.0)
"""A step by nearly the gradient itself."""
LAYOUTS = {
    "tensor": ParallelOptions(ranks=2, tensor=2),
    "context": ParallelOptions(ranks=2, context=2),
    "pipeline": ParallelOptions(ranks=2, pipeline=2),
    "data": ParallelOptions(ranks=2),
}


def targeted(make_batch: MakeBatch, **options: Any) -> Batch:
    """Return a batch with targets of both signs, among them equal and missing ones."""
    batch = make_batch(LENGTHS, **options)
    ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask").values
    draw = np.random.default_rng(1)
    targets = draw.integers(0, VOCAB, (len(mask), NUM_TARGETS)).astype(np.int32)
    targets[:, 2] = np.where(draw.random(len(mask)) < 0.5, -1, targets[:, 0])
    weights = draw.normal(0, 0.03, targets.shape) * (targets >= 0) * mask[:, None]
    columns = {"target_ids": targets, "target_weights": weights, "loss_weights": mask}
    dtypes = {"target_weights": np.float32, "loss_weights": np.float32}
    return batch.with_columns(
        {name: Ragged(values.astype(dtypes.get(name, values.dtype)), ids.offsets) for name, values in columns.items()}
    )


def reference(policy: Path, batch: Batch) -> tuple[float, list[Tensor], dict[str, Tensor]]:
    """Return the loss, each row's logprobs of its targets, and the gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, trust_remote_code=False
    ).double()
    rows, loss = [], torch.zeros((), dtype=torch.float64)
    for index, ids in enumerate(batch.ragged("input_ids")):
        targets = torch.from_numpy(batch.ragged("target_ids")[index].astype(np.int64))[1:]
        weights = torch.from_numpy(batch.ragged("target_weights")[index].astype(np.float64))[1:]
        logprobs = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(-1, targets.clamp_min(0)) * (targets >= 0))
        loss = loss - (weights * rows[-1]).sum()
    loss.backward()
    return float(loss), [row.detach() for row in rows], {name: one.grad for name, one in model.named_parameters()}


def learned(learner: MegatronLearner, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    result = learner.forward_backward(batch, tinker_objective("cross_entropy"), with_tokens=True)
    assert learner.optim_step(AS_GRADIENT).is_applied
    after = learner.export_weights()
    return result, {name: tensor - after[name] for name, tensor in before.items()}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name].double(), gradient.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_losses_gradients_and_logprobs_are_those_of_transformers(
    backend: Any, tied_policy: Path, make_batch: MakeBatch
) -> None:
    batch = targeted(make_batch)
    learner = MegatronLearner(tied_policy, OPTIONS, backend=backend)
    is_given = batch.ragged("target_ids").values >= 0
    scored = learner.logprobs(batch)
    loss, rows, gradients = reference(tied_policy, batch)
    result, found = learned(learner, batch)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    mask = batch.ragged("loss_mask").values[:, None]
    for logprobs, kept in ((scored, is_given), (result.tokens["policy_logprobs"], is_given & mask)):
        given = Ragged(np.where(kept, logprobs.values, 0), logprobs.offsets)
        kept_rows = Ragged(kept, logprobs.offsets)
        for index, row in enumerate(rows):
            np.testing.assert_allclose(given[index][1:], row.numpy() * kept_rows[index][1:], rtol=0, atol=3e-6)
    assert_same_gradients(found, gradients)
    learner.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(layout: str, two_ranks: Any, tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = targeted(make_batch, num_prompts=3)
    options = replace(OPTIONS, shared_prefix_tokens=1)
    alone = MegatronLearner(tied_policy, replace(OPTIONS, shared_prefix_tokens=0))
    together = MegatronLearner(tied_policy, options, ranks=two_ranks.in_layout(LAYOUTS[layout]), name="together")
    np.testing.assert_allclose(together.logprobs(batch).values, alone.logprobs(batch).values, rtol=0, atol=3e-6)
    (found, of_found), (wanted, of_wanted) = learned(together, batch), learned(alone, batch)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert_same_gradients(of_found, of_wanted)
    together.close()
    alone.close()


def test_one_target_that_is_the_token_is_the_token(tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = make_batch(LENGTHS)
    ids, weights = batch.ragged("input_ids"), batch.ragged("loss_weights")
    columns = {"target_ids": ids.values[:, None], "target_weights": weights.values[:, None]}
    columns["loss_weights"] = batch.ragged("loss_mask").values.astype(np.float32)
    as_target = batch.with_columns({name: Ragged(values, ids.offsets) for name, values in columns.items()})
    as_one = batch.with_columns({"target_ids": ids})
    found = []
    for rows in (batch, as_one, as_target):
        objective = tinker_objective("cross_entropy")
        learner = MegatronLearner(tied_policy, OPTIONS)
        loss = learner.forward_backward(rows, objective).loss
        learner.optim_step()
        found.append((loss, {name: tensor.clone() for name, tensor in learner.export_weights().items()}))
        learner.close()
    for loss, learned_weights in found[1:]:
        assert loss == found[0][0]
        assert different_tensors(learned_weights, found[0][1]) == []
