"""A policy that teaches itself, compared with transformers on what each side reads."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import CheckpointError
from rl_distill.learner import LearnerOptions
from rl_distill.megatron.learner import MegatronLearner, MegatronReference
from rl_distill.objectives import DistillationObjective, DistillationObjectiveOptions, supervised_objective
from rl_distill.options import LoraOptions, ParallelOptions
from rl_distill.teacher import TEACHER_PROMPT, with_self_scores

MakeBatch = Callable[..., Batch]
VOCAB_SIZE, LENGTHS = 40, (7, 3, 12, 5, 1, 9)
OPTIONS = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=24, num_threads=1, clip_grad=0.0, eps=1e-6)
PROMPTS = [[5, 6, 7, 8, 9], [3], None, [11, 12, 13], [4, 4], [1, 2, 3, 4, 5, 6, 7]]
"""The teacher's prompt of each row, which has two prompt tokens itself; the fifth row has no response."""
LOSSES = {
    "reverse, whole": {"loss": "reverse_kl", "distribution": "full"},
    "forward, whole": {"loss": "forward_kl", "distribution": "full"},
    "reverse, top 6": {"loss": "reverse_kl"},
    "k1": {"loss": "k1"},
    "k3": {"loss": "k3"},
}


@pytest.fixture
def batch(make_batch: MakeBatch) -> Batch:
    extras = [{} if prompt is None else {TEACHER_PROMPT: [2, prompt], "other": 1} for prompt in PROMPTS]
    return make_batch(LENGTHS).with_extras(extras)


def logits_of(model: Any, ids: Any) -> torch.Tensor:
    """Return [T, V] logits that predict each token; 0 at the first."""
    logits = model(torch.as_tensor(np.asarray(ids, dtype=np.int64))[None]).logits[0]
    return torch.cat([torch.zeros(1, logits.shape[1]), logits[:-1]])


def read_by_both(model: Any, batch: Batch, teacher: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the student's and the teacher's [M, V] logprobs of the taught tokens, and the tokens."""
    student, taught, tokens = [], [], []
    for ids, mask, prompt in zip(batch.ragged("input_ids"), batch.ragged("loss_mask"), PROMPTS, strict=True):
        if prompt is None or not mask.any():
            continue
        student.append(logits_of(model, ids)[2:].log_softmax(-1))
        with torch.no_grad():
            taught.append(logits_of(teacher, [*prompt, *ids[2:]])[len(prompt) :].log_softmax(-1))
        tokens.append(torch.from_numpy(ids[2:].astype(np.int64)))
    return torch.cat(student), torch.cat(taught), torch.cat(tokens)


def loss_of_paper(name: str, student: torch.Tensor, teacher: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token: KL of the student's and the fixed teacher's distribution, or an estimate of it."""
    if "whole" in name:
        log_p, log_q = (student, teacher) if name.startswith("reverse") else (teacher, student)
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if "top" in name:
        best = teacher.topk(6).indices
        both = [one.gather(-1, best) for one in (student, teacher)]
        log_p, log_q = (torch.cat([of, (1 - of.exp().sum(-1, keepdim=True)).log()], -1) for of in both)
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    own, other = (of.gather(-1, tokens[:, None])[:, 0] for of in (student, teacher))
    if name == "k3":  # Schulman 2020: r - 1 - log r
        return (other - own).exp() - 1 - (other - own)
    # The score-function gradient of KL(student, teacher) is E[(log student - log teacher) grad log student].
    return (own - other).detach() + (own - other).detach() * (own - own.detach())


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_the_papers(name: str, tied_policy: Path, batch: Batch) -> None:
    options = DistillationObjectiveOptions(**LOSSES[name])  # type: ignore[arg-type]
    learner = MegatronLearner(tied_policy, OPTIONS)
    top_k = 6 if "top" in name else 0
    taught = with_self_scores(batch, partial(learner.score, top_k=top_k, has_hidden="whole" in name))
    found = learner.train_step(taught, DistillationObjective(options))

    model = transformers.AutoModelForCausalLM.from_pretrained(tied_policy, trust_remote_code=False)
    student, teacher, tokens = read_by_both(model, batch, model)
    loss = loss_of_paper(name, student, teacher, tokens).sum() / batch.ragged("loss_mask").values.sum()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert loss.item() > 0.01
    assert found.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert found.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert found.metrics["actor/distillation/aligned_fraction"] == pytest.approx(len(tokens) / batch_size(batch))


def batch_size(batch: Batch) -> int:
    return int(batch.ragged("loss_mask").values.sum())


def test_columns_are_aligned_with_the_response_whatever_the_prompts_and_micro_batches(
    tied_policy: Path, batch: Batch
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tied_policy, trust_remote_code=False)
    found = []
    for tokens in (8, 1 << 14):
        learner = MegatronLearner(tied_policy, replace(OPTIONS, micro_batch_tokens=tokens), name=f"of{tokens}")
        found.append(with_self_scores(batch, partial(learner.score, top_k=4, temperature=0.7, has_hidden=True)))
    for row, prompt in enumerate(PROMPTS):
        ids, mask, logprobs, top, index = (
            found[0].ragged(name)[row]
            for name in ("input_ids", "loss_mask", "teacher_logprobs", "teacher_ids", "teacher_index")
        )
        is_taught = mask & (prompt is not None)
        np.testing.assert_array_equal(index, np.where(is_taught, 0, -1))
        assert not logprobs[~is_taught].any()
        assert (top[~is_taught] == -1).all()
        if not is_taught.any():
            continue
        expected = (logits_of(model, [*prompt, *ids[2:]])[len(prompt) :].detach() / 0.7).log_softmax(-1)
        np.testing.assert_array_equal(top[2:, 0], ids[2:])
        np.testing.assert_allclose(
            logprobs[2:], np.take_along_axis(expected.numpy(), top[2:].astype(np.int64), axis=1), atol=1e-5
        )
        np.testing.assert_allclose(logprobs[2:, 1:], expected.topk(4).values, atol=1e-5)
    for name in ("teacher_logprobs", "teacher_hidden"):
        np.testing.assert_allclose(found[0].ragged(name).values, found[1].ragged(name).values, atol=2e-5)
    assert found[0].extras == batch.extras


def test_a_step_without_any_teacher_s_prompt_has_no_gradient(tied_policy: Path, batch: Batch) -> None:
    learner = MegatronLearner(tied_policy, OPTIONS)
    score = partial(learner.score, top_k=0, has_hidden=True)
    untaught = with_self_scores(batch.with_extras([{}] * len(batch)), score)
    assert (untaught.ragged("teacher_index").values == -1).all()
    objective = DistillationObjective(DistillationObjectiveOptions(loss="reverse_kl", distribution="full"))
    found = learner.train_step(untaught, objective)
    assert (found.loss, found.grad_norm) == (0.0, 0.0)


def test_under_its_own_prompt_the_policy_has_nothing_to_learn(tied_policy: Path, batch: Batch) -> None:
    learner = MegatronLearner(tied_policy, OPTIONS)
    taught = with_self_scores(batch, partial(learner.score, top_k=8), keeps_prompts=True)
    found = learner.train_step(taught, DistillationObjective(DistillationObjectiveOptions(loss="reverse_kl")))
    assert found.metrics["actor/distillation/aligned_fraction"] == 1.0
    assert abs(found.loss) < 1e-6
    assert found.grad_norm < 1e-5


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapter"])
def test_the_reference_teaches_with_the_initial_weights(rank: int, tied_policy: Path, batch: Batch) -> None:
    learner = MegatronLearner(tied_policy, replace(OPTIONS, learning_rate=0.03), lora=LoraOptions(rank=rank))
    for _ in range(2):
        learner.train_step(batch, supervised_objective)
    if rank == 0:
        learner.load_teacher_heads([tied_policy])
        score: Any = MegatronReference(tied_policy, OPTIONS).score
    else:
        score = partial(learner.score, weights="reference")
    taught = with_self_scores(batch, partial(score, top_k=0, has_hidden=True))
    objective = DistillationObjective(DistillationObjectiveOptions(loss="forward_kl", distribution="full"))
    trained = learner.export_weights()
    model, first = (
        transformers.AutoModelForCausalLM.from_pretrained(tied_policy, trust_remote_code=False) for _ in "ab"
    )
    model.load_state_dict(dict(trained), strict=False)
    student, teacher, tokens = read_by_both(model, batch, first)
    expected = loss_of_paper("forward, whole", student, teacher, tokens).sum() / batch_size(batch)
    assert learner.train_step(taught, objective).loss == pytest.approx(expected.item(), rel=1e-5)


LAYOUTS = {
    "inline": None,
    "distributed optimizer": ParallelOptions(ranks=2, distributed_optimizer=True),
    "tensor": ParallelOptions(ranks=2, tensor=2),
    "pipeline": ParallelOptions(ranks=2, pipeline=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapter"])
def test_the_average_follows_the_weights_and_teaches(
    layout: str, rank: int, two_ranks: Any, tied_policy: Path, batch: Batch, tmp_path: Path
) -> None:
    parallel = LAYOUTS[layout]
    ranks = None if parallel is None else two_ranks.in_layout(parallel)

    def build(name: str, *, decay: float = 0.75) -> MegatronLearner:
        return MegatronLearner(
            tied_policy,
            replace(OPTIONS, learning_rate=0.02),
            lora=LoraOptions(rank=rank),
            ranks=ranks,
            name=name,
            average_decay=decay,
        )

    learner, plain = build("averaged"), build("plain", decay=0.0)
    average = trained_of(learner, rank)
    for _ in range(3):
        learner.train_step(batch, supervised_objective)
        plain.train_step(batch, supervised_objective)
        average = {name: 0.75 * average[name] + 0.25 * one for name, one in trained_of(learner, rank).items()}
    before = trained_of(learner, rank)
    if layout == "inline":
        assert all(torch.equal(one, trained_of(plain, rank)[name]) for name, one in before.items())
    taught = with_average(learner, batch)
    assert all(torch.equal(one, trained_of(learner, rank)[name]) for name, one in before.items())
    expected = average if rank == 0 else merged(tied_policy, average)
    model = transformers.AutoModelForCausalLM.from_pretrained(tied_policy, trust_remote_code=False)
    model.load_state_dict(expected, strict=False)
    with torch.no_grad():
        _, teacher, tokens = read_by_both(model, batch, model)
    index = taught.ragged("teacher_index").values
    logprobs = taught.ragged("teacher_logprobs").values[index == 0, 0]
    np.testing.assert_allclose(logprobs, teacher.gather(-1, tokens[:, None])[:, 0], atol=3e-5)

    learner.save(tmp_path / "saved")
    other = build("resumed")
    other.load(tmp_path / "saved")
    for one in (learner, other):
        one.train_step(batch, supervised_objective)
    assert_equal_columns(with_average(learner, batch), with_average(other, batch))
    with pytest.raises(CheckpointError, match="has a tensor 'average/"):
        build("without", decay=0.0).load(tmp_path / "saved")


def with_average(learner: MegatronLearner, batch: Batch) -> Batch:
    return with_self_scores(batch, partial(learner.score, weights="average", top_k=3))


def assert_equal_columns(found: Batch, expected: Batch) -> None:
    for name in ("teacher_logprobs", "teacher_ids"):
        column = expected[name]
        assert isinstance(column, Ragged)
        np.testing.assert_array_equal(found.ragged(name).values, column.values)


def trained_of(learner: MegatronLearner, rank: int) -> dict[str, torch.Tensor]:
    found = learner.export_adapter() if rank else learner.export_weights()
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def merged(folder: Path, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the base's weights plus B A, where B is scaled."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).state_dict()
    for name, a in adapter.items():
        if "lora_A" in name:
            target = f"{name.removeprefix('base_model.model.').split('.lora_A')[0]}.weight"
            base[target] = base[target] + adapter[name.replace("lora_A", "lora_B")] @ a
    return base
