"""The column `nucleus_ids`: tokens scored among those that top-k and top-p kept, compared with transformers' logits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ShapeError
from rl_distill.learner import MetricSums, MicroBatch
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives.vocabulary import nucleus_logprobs
from rl_distill.options import AdamOptions, LearnerOptions, LoraOptions, ParallelOptions

MakeBatch = Callable[..., Batch]
LENGTHS = (7, 3, 12, 3, 5, 1, 9)
WIDTH, VOCAB, TEMPERATURE, BONUS = 6, 40, 0.7, 0.3
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


def with_entropy_bonus(logprobs: Tensor, entropy: Tensor | None, micro_batch: MicroBatch) -> tuple[Tensor, MetricSums]:
    """Weight both results, so that each has a gradient."""
    assert entropy is not None
    return -(micro_batch.columns["loss_weights"] * (logprobs + BONUS * entropy)).sum(), {}


def truncated(make_batch: MakeBatch, **options: Any) -> Batch:
    """Return a batch whose trained tokens have nuclei of 1 to 6 tokens, their own at any place; others have none."""
    batch = make_batch(LENGTHS, **options)
    ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask").values
    draw = np.random.default_rng(2)
    nuclei = np.full((len(mask), WIDTH), -1, np.int32)
    for place in np.flatnonzero(mask):
        own, size = ids.values[place], draw.integers(0, WIDTH)
        others = draw.permutation(np.setdiff1d(np.arange(VOCAB), [own]))[:size]
        nuclei[place, : size + 1] = draw.permutation([own, *others])
    return batch.with_columns({"nucleus_ids": Ragged(nuclei, ids.offsets)})


def reference(policy: Path, batch: Batch) -> tuple[float, dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Return loss, gradients, and each row's logprobs and entropies, by softmax over the nuclei alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, trust_remote_code=False
    ).double()
    loss, logprobs, entropies = torch.zeros((), dtype=torch.float64), [], []
    for index, ids in enumerate(batch.ragged("input_ids")):
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] / TEMPERATURE
        own, drawn_from = torch.zeros(len(ids), dtype=torch.float64), torch.zeros(len(ids), dtype=torch.float64)
        for place in np.flatnonzero(batch.ragged("loss_mask")[index]):
            nucleus = [int(one) for one in batch.ragged("nucleus_ids")[index][place] if one >= 0]
            probabilities = logits[place - 1, nucleus].softmax(-1)
            own[place] = probabilities[nucleus.index(int(ids[place]))].log()
            drawn_from[place] = -(probabilities * probabilities.log()).sum()
        weights = torch.from_numpy(batch.ragged("loss_weights")[index].astype(np.float64))
        loss = loss - (weights * (own + BONUS * drawn_from)).sum()
        logprobs.append(own.detach())
        entropies.append(drawn_from.detach())
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in model.named_parameters()}, logprobs, entropies


def learned(learner: MegatronLearner, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
    before = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    result = learner.forward_backward(
        batch, with_entropy_bonus, temperature=TEMPERATURE, with_entropy=True, with_tokens=True
    )
    assert learner.optim_step(AS_GRADIENT).is_applied
    after = learner.export_weights()
    return result, {name: tensor - after[name] for name, tensor in before.items()}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name].double(), gradient.double(), rtol=0, atol=1e-6)


def test_probabilities_among_kept_tokens_add_up_to_one() -> None:
    logprobs = torch.tensor([[0.5, 0.5, 0.3, 0.2], [0.2, 0.2, 0.5, 0.3], [0.3, 0.7, 0.7, 0.7]]).log()
    ids = torch.tensor([[4, 4, 7, -1], [9, 9, 8, -1], [3, -1, -1, -1]])
    found, entropy = nucleus_logprobs(logprobs, ids)
    kept = [0.5 / 0.8, 0.2 / 0.7, 1.0]
    torch.testing.assert_close(found.exp(), torch.tensor(kept))
    of_kept = [-sum(p * np.log(p) for p in (one, 1 - one) if p) for one in kept]
    torch.testing.assert_close(entropy, torch.tensor(of_kept, dtype=torch.float32))
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.autograd.gradcheck(lambda of: nucleus_logprobs(of.log_softmax(-1), ids), logits)


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_losses_gradients_and_tokens_are_those_of_transformers(
    backend: Any, tied_policy: Path, make_batch: MakeBatch
) -> None:
    batch = truncated(make_batch)
    learner = MegatronLearner(tied_policy, OPTIONS, backend=backend)
    scored = learner.logprobs(batch, temperature=TEMPERATURE)
    loss, gradients, logprobs, entropies = reference(tied_policy, batch)
    result, found = learned(learner, batch)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    for index, (own, drawn_from) in enumerate(zip(logprobs, entropies, strict=True)):
        for column, wanted in (
            (scored, own),
            (result.tokens["policy_logprobs"], own),
            (result.tokens["entropy"], drawn_from),
        ):
            np.testing.assert_allclose(column[index], wanted.numpy(), rtol=0, atol=3e-6)
    assert_same_gradients(found, gradients)
    learner.close()


def test_the_base_under_an_adapter_scores_among_the_kept_tokens_too(tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = truncated(make_batch)
    learner = MegatronLearner(tied_policy, OPTIONS, lora=LoraOptions(rank=2))
    wanted = learner.logprobs(batch, temperature=TEMPERATURE)  # an adapter starts as no change
    found = learner.reference().logprobs(batch, temperature=TEMPERATURE)
    np.testing.assert_allclose(found.values, wanted.values, rtol=0, atol=1e-6)
    learner.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(layout: str, two_ranks: Any, tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = truncated(make_batch, num_prompts=3)
    options = replace(OPTIONS, shared_prefix_tokens=1)
    alone = MegatronLearner(tied_policy, replace(OPTIONS, shared_prefix_tokens=0))
    together = MegatronLearner(tied_policy, options, ranks=two_ranks.in_layout(LAYOUTS[layout]), name="together")
    np.testing.assert_allclose(together.logprobs(batch).values, alone.logprobs(batch).values, rtol=0, atol=3e-6)
    (found, of_found), (wanted, of_wanted) = learned(together, batch), learned(alone, batch)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert_same_gradients(of_found, of_wanted)
    together.close()
    alone.close()


def test_a_nucleus_of_all_tokens_changes_nothing(tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = make_batch(LENGTHS)
    ids = batch.ragged("input_ids")
    everything = np.tile(np.arange(VOCAB, dtype=np.int32), (len(ids.values), 1))
    learner = MegatronLearner(tied_policy, OPTIONS)
    whole = batch.with_columns({"nucleus_ids": Ragged(everything, ids.offsets)})
    np.testing.assert_allclose(learner.logprobs(whole).values, learner.logprobs(batch).values, rtol=0, atol=3e-6)
    learner.close()


@pytest.mark.parametrize("wrong", [[5, 5], [-2, 5], [5, VOCAB], [6, 7], [-1, -1]])
def test_nuclei_that_cannot_be_are_refused(wrong: list[int], tied_policy: Path, make_batch: MakeBatch) -> None:
    batch = make_batch((3, 4))
    ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask").values
    values = ids.values.copy()
    values[5] = 5
    nuclei = np.stack([np.where(mask, values, -1), np.full(7, -1)], axis=1).astype(np.int32)
    nuclei[5] = wrong
    changed = {"input_ids": values, "nucleus_ids": nuclei}
    batch = batch.with_columns({name: Ragged(column, ids.offsets) for name, column in changed.items()})
    learner = MegatronLearner(tied_policy, OPTIONS)
    says = r"different ids below 40 that include each trained token.*row 1, token 2 \(5\)"
    with pytest.raises(ShapeError, match=says):
        learner.train_step(batch, with_entropy_bonus, with_entropy=True)
    both = batch.with_columns({"target_ids": ids})
    with pytest.raises(ShapeError, match="target_ids or nucleus_ids"):
        learner.logprobs(both)
    learner.close()
