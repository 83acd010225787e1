"""Distillation in the learners: Megatron compared with torch, in chunks, in all layouts; the student as teacher."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch_learner import TorchLearner

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError, SettingsError
from rl_core.weights import LORA_A, PEFT_PREFIX
from rl_distill.architecture.policy_config import parse_policy_config, read_policy_config
from rl_distill.learner import LearnerOptions, StepResult
from rl_distill.megatron import head
from rl_distill.megatron.learner import MegatronLearner, MegatronTeacherModel
from rl_distill.objectives.distillation import (
    DistillationObjective,
    DistillationObjectiveOptions,
    distillation_sums,
    with_distillation_advantages,
)
from rl_distill.objectives.policy import PolicyObjectiveOptions, policy_objective
from rl_distill.options import LoraOptions, ParallelOptions
from rl_distill.parallel_layout import teacher_layout

MakeBatch = Callable[..., Batch]
VOCAB_SIZE = 40
LENGTHS = (7, 3, 12, 3, 5, 1, 9, 12, 4, 6)
OPTIONS = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=24, num_threads=1, clip_grad=0.0, eps=1e-6)
TASKS = policy_objective(PolicyObjectiveOptions(policy_loss="ppo_clip", entropy_coefficient=0.01))

LOSSES = {
    "forward": DistillationObjectiveOptions(loss="forward_kl", teachers=("big", "small")),
    "forward at another temperature": DistillationObjectiveOptions(loss="forward_kl", temperature=0.5),
    "forward without tail": DistillationObjectiveOptions(loss="forward_kl", tail="drop"),
    "reverse": DistillationObjectiveOptions(loss="reverse_kl", coefficient=0.5),
    "reverse renormalised": DistillationObjectiveOptions(loss="reverse_kl", tail="renormalise"),
    "js": DistillationObjectiveOptions(loss="js", beta=0.3),
    "js clamped": DistillationObjectiveOptions(loss="js", max_loss=0.3, min_logprob=-4.0),
    "full forward": DistillationObjectiveOptions(loss="forward_kl", distribution="full"),
    "full reverse": DistillationObjectiveOptions(loss="reverse_kl", distribution="full", temperature=2.0),
    "full js": DistillationObjectiveOptions(loss="js", distribution="full", min_logprob=-6.0),
    "uld": DistillationObjectiveOptions(loss="uld"),
    "k1": DistillationObjectiveOptions(loss="k1"),
    "abs": DistillationObjectiveOptions(loss="abs"),
    "k2": DistillationObjectiveOptions(loss="k2"),
    "k3": DistillationObjectiveOptions(loss="k3"),
    "nll": DistillationObjectiveOptions(loss="nll"),
}


@pytest.fixture(scope="session")
def big_teacher(policy_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": VOCAB_SIZE + 3}  # the vocabulary needs padding
    return policy_writer(tmp_path_factory.mktemp("big-teacher"), **changes)


@cache
def scored(make_batch: MakeBatch, teacher: Path, *, top_k: int, temperature: float) -> tuple[Ragged, Ragged, Ragged]:
    """Return a teacher's logprobs, tokens and hidden states of a batch, for all tests that learn from them."""
    model = MegatronTeacherModel(teacher, OPTIONS)
    logprobs, tokens, hidden = model.score(make_batch(LENGTHS), top_k=top_k, temperature=temperature, has_hidden=True)
    model.close()
    assert hidden is not None
    return logprobs, tokens, hidden


def taught(make_batch: MakeBatch, teachers: list[Path], *, top_k: int = 5, temperature: float = 1.0) -> Batch:
    """Return a batch with the teachers' scores; its rows alternate between teachers, and the last row has none."""
    answers = [scored(make_batch, folder, top_k=top_k, temperature=temperature) for folder in teachers]
    batch = make_batch(LENGTHS)
    ids = batch.ragged("input_ids")
    rows = np.repeat(np.arange(len(batch)), ids.lengths)
    which = np.where(batch.ragged("loss_mask").values & (rows < len(batch) - 1), rows % len(teachers), -1)
    width = max(hidden.values.shape[1] for *_, hidden in answers)
    columns = {
        "teacher_logprobs": np.zeros((len(rows), top_k + 1), dtype=np.float32),
        "teacher_ids": np.full((len(rows), top_k + 1), -1, dtype=np.int32),
        "teacher_hidden": np.zeros((len(rows), width), dtype=np.float32),
    }
    for number, (logprobs, tokens, hidden) in enumerate(answers):
        chosen = which == number
        is_known = tokens.values[chosen] < VOCAB_SIZE  # as from the service
        columns["teacher_logprobs"][chosen] = np.where(is_known, logprobs.values[chosen], 0.0)
        columns["teacher_ids"][chosen] = np.where(is_known, tokens.values[chosen], -1)
        columns["teacher_hidden"][chosen, : hidden.values.shape[1]] = hidden.values[chosen]
    columns["teacher_index"] = which.astype(np.int16)
    return batch.with_columns({name: Ragged(values, ids.offsets) for name, values in columns.items()})


def objective(name: str, *, has_tasks: bool) -> DistillationObjective:
    return DistillationObjective(LOSSES[name], TASKS if has_tasks else None)


def teachers_of(name: str, big: Path, student: Path) -> list[Path]:
    """Return a stronger teacher, and except for "uld" the student: |p - q| has no derivative at p = q."""
    return [big] if name == "uld" else [big, student]


def step_of(learner: Any, batch: Batch, wanted: DistillationObjective, teachers: list[Path]) -> StepResult:
    if wanted.options.distribution == "full":
        learner.load_teacher_heads(teachers)
    return learner.train_step(batch, wanted, with_entropy=True)


def assert_same(found: StepResult, expected: StepResult, *, tolerance: float) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * tolerance, abs=tolerance)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("name", ["full forward", "reverse"])
def test_an_adapter_learns_what_plain_torch_learns(
    name: str, tied_policy: Path, big_teacher: Path, make_batch: Any
) -> None:
    """B starts at zero: its gradient is the weight's gradient times A transposed, and A has none."""
    teachers, lora = teachers_of(name, big_teacher, tied_policy), LoraOptions(rank=2, alpha=3.0)
    batch, wanted = taught(make_batch, teachers), objective(name, has_tasks=False)
    plain, learner = TorchLearner(tied_policy, OPTIONS), MegatronLearner(tied_policy, OPTIONS, lora=lora)
    first = {name: tensor.clone() for name, tensor in learner.export_adapter().items() if name.endswith(LORA_A)}

    found, expected = (step_of(one, batch, wanted, teachers) for one in (learner, plain))

    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    weights = {
        name: plain._parameters[f"{name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A)}.weight"] for name in first
    }
    gradients = [weights[name].grad @ a.T for name, a in first.items()]
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    assert found.grad_norm == pytest.approx(lora.scaling * norm, rel=1e-5)


@pytest.mark.parametrize("has_tasks", [False, True], ids=["alone", "with tasks"])
@pytest.mark.parametrize("name", LOSSES)
def test_megatron_learns_what_plain_torch_learns(
    name: str, has_tasks: bool, tied_policy: Path, big_teacher: Path, make_batch: Any, monkeypatch: Any
) -> None:
    teachers = teachers_of(name, big_teacher, tied_policy)
    batch = taught(make_batch, teachers)
    wanted = objective(name, has_tasks=has_tasks)
    plain = TorchLearner(tied_policy, OPTIONS)
    whole, chunked = MegatronLearner(tied_policy, OPTIONS), MegatronLearner(tied_policy, OPTIONS, name="chunked")
    expected = step_of(plain, batch, wanted, teachers)
    found = step_of(whole, batch, wanted, teachers)
    assert_same(found, expected, tolerance=3e-6)
    assert found.metrics["actor/distillation/loss"] > 0.01
    assert found.grad_norm > 0
    monkeypatch.setattr(head, "KEPT_LOGITS", 3 * VOCAB_SIZE)
    assert_same(step_of(chunked, batch, wanted, teachers), found, tolerance=1e-6)
    weights = whole.export_weights()
    for tensor_name, tensor in plain.export_weights().items():
        # Adam's first step is the sign of the gradient, which rounding may flip where the gradient is nearly 0.
        assert ((weights[tensor_name] - tensor).abs() > 1e-4).float().mean() < 0.1, tensor_name


@pytest.mark.parametrize("name", ["forward", "full js", "k3"])
def test_in_bfloat16_both_learn_nearly_the_same(
    name: str, tied_policy: Path, big_teacher: Path, make_batch: Any
) -> None:
    options = replace(OPTIONS, dtype="bfloat16")
    batch = taught(make_batch, [big_teacher])
    for has_tasks in (False, True):
        wanted = objective(name, has_tasks=has_tasks)
        learners = (MegatronLearner(tied_policy, options), TorchLearner(tied_policy, options))
        found, expected = (step_of(learner, batch, wanted, [big_teacher]) for learner in learners)
        assert found.loss == pytest.approx(expected.loss, rel=5e-2, abs=1e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.1)


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        *itertools.product(
            [
                ParallelOptions(ranks=2, tensor=2),
                ParallelOptions(ranks=2, tensor=2, sequence=True),
                ParallelOptions(ranks=2, pipeline=2),
                ParallelOptions(ranks=2, context=2),
                ParallelOptions(ranks=2),
            ],
            ["forward", "full js"],
        ),
        *itertools.product([ParallelOptions(ranks=2, tensor=2)], ["reverse renormalised", "full reverse", "uld", "k3"]),
    ],
    ids=str,
)
def test_every_layout_learns_the_same(
    parallel: ParallelOptions, name: str, two_ranks: Any, tied_policy: Path, big_teacher: Path, make_batch: Any
) -> None:
    teachers = teachers_of(name, big_teacher, tied_policy)
    batch = taught(make_batch, teachers)
    ranks = two_ranks.in_layout(parallel)
    for number, has_tasks in enumerate((False, True)):
        wanted = objective(name, has_tasks=has_tasks)
        alone = MegatronLearner(tied_policy, OPTIONS, name=f"alone{number}")
        together = MegatronLearner(tied_policy, OPTIONS, ranks=ranks, name=f"together{number}")
        expected = [step_of(alone, batch, wanted, teachers) for _ in range(2)]
        found = [step_of(together, batch, wanted, teachers) for _ in range(2)]
        assert_same(found[0], expected[0], tolerance=1e-6)
        assert_same(found[1], expected[1], tolerance=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_mixture_teaches_a_dense_student_what_transformers_says(
    num_ranks: int, two_ranks: Any, tied_policy: Path, mixture_policy: Path, make_batch: Any
) -> None:
    layout = teacher_layout(num_ranks, parse_policy_config(read_policy_config(mixture_policy)))
    ranks = two_ranks.in_layout(layout) if num_ranks > 1 else None
    teacher, batch, top_k = MegatronTeacherModel(mixture_policy, OPTIONS, ranks=ranks), make_batch(LENGTHS), 5
    experts = Ragged(np.zeros((sum(LENGTHS), 9, 1), np.int16), batch.ragged("input_ids").offsets)  # of another policy
    logprobs, tokens, hidden = teacher.score(
        batch.with_columns({"routed_experts": experts}), top_k=top_k, has_hidden=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture_policy, trust_remote_code=False)
    for row, ids in enumerate(batch.ragged("input_ids")):
        sampled = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            said = model(sampled[None], output_hidden_states=True)
        expected = said.logits[0, :-1].log_softmax(-1)
        found, named = torch.from_numpy(logprobs[row][1:]), torch.from_numpy(tokens[row][1:]).long()
        assert torch.equal(named[:, 0], sampled[1:])
        torch.testing.assert_close(found, expected.gather(-1, named), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[:, 1:], expected.topk(top_k).values, rtol=0, atol=1e-5)
        assert hidden is not None
        np.testing.assert_allclose(hidden[row][1:], said.hidden_states[-1][0, :-1], rtol=0, atol=2e-5)
    if num_ranks == 1:
        taught_by_it = taught(make_batch, [mixture_policy])
        for name in ("forward", "full reverse", "k3"):
            learners = MegatronLearner(tied_policy, OPTIONS), TorchLearner(tied_policy, OPTIONS)
            both = [step_of(one, taught_by_it, objective(name, has_tasks=False), [mixture_policy]) for one in learners]
            assert_same(*both, tolerance=3e-6)


EQUAL = [name for name in LOSSES if name not in ("nll", "uld", "forward without tail", "js clamped")]


@pytest.mark.parametrize("name", EQUAL)
def test_a_student_that_is_its_teacher_learns_nothing(name: str, tied_policy: Path, make_batch: Any) -> None:
    options = replace(LOSSES[name], teachers=("itself",))
    batch = taught(make_batch, [tied_policy], temperature=options.temperature)
    for learner in (MegatronLearner(tied_policy, OPTIONS), TorchLearner(tied_policy, OPTIONS)):
        found = step_of(learner, batch, DistillationObjective(options), [tied_policy])
        assert abs(found.loss) < 1e-6
        assert found.grad_norm < 1e-5 / options.temperature**2  # float32 rounds the logprobs
        if "actor/distillation/agreement" in found.metrics:
            assert found.metrics["actor/distillation/agreement"] == 1.0
            assert found.metrics["actor/distillation/overlap_ratio"] == 1.0
            assert found.metrics["actor/distillation/itself/student_mass"] == pytest.approx(
                found.metrics["actor/distillation/itself/teacher_mass"], abs=1e-5
            )


def test_without_its_tail_the_mass_is_drawn_into_the_top_k_even_from_an_equal_student(
    tied_policy: Path, make_batch: Any
) -> None:
    batch = taught(make_batch, [tied_policy])
    found = MegatronLearner(tied_policy, OPTIONS).train_step(batch, objective("forward without tail", has_tasks=False))
    assert abs(found.loss) < 1e-6
    assert found.grad_norm > 1e-3


def test_the_top_of_the_whole_vocabulary_is_the_whole_distribution(
    tied_policy: Path, big_teacher: Path, make_batch: Any, policy_writer: Any, tmp_path: Path
) -> None:
    teacher = policy_writer(tmp_path / "teacher", hidden_size=48)
    batch = taught(make_batch, [teacher], top_k=VOCAB_SIZE)
    for loss in ("forward_kl", "reverse_kl", "js"):
        results = []
        for distribution in ("top_k", "full"):
            learner = MegatronLearner(tied_policy, OPTIONS, name=f"{loss}-{distribution}")
            wanted = DistillationObjective(DistillationObjectiveOptions(loss=loss, distribution=distribution))
            results.append(step_of(learner, batch, wanted, [teacher]))
        assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)


def test_absolute_losses_are_summed_beside_losses() -> None:
    losses, index = torch.tensor([-1.0, 2.0, 5.0, 7.0]), torch.tensor([0, 0, -1, 0])
    sums = distillation_sums({"loss": losses}, index, torch.tensor([True, True, True, False]))
    assert [float(part) for part in sums["actor/distillation/loss"]] == [1.0, 2.0]
    assert [float(part) for part in sums["actor/distillation/abs_loss"]] == [3.0, 2.0]
    assert [float(part) for part in sums["actor/distillation/loss_min"]] == [-1.0, 2.0]
    assert [float(part) for part in sums["actor/distillation/loss_max"]] == [2.0, 2.0]


def test_measures_of_each_teacher_make_up_those_of_all(tied_policy: Path, big_teacher: Path, make_batch: Any) -> None:
    batch = taught(make_batch, [big_teacher, tied_policy])
    found = MegatronLearner(tied_policy, OPTIONS).train_step(batch, objective("forward", has_tasks=False)).metrics
    mask, index = batch.ragged("loss_mask").values, batch.ragged("teacher_index").values
    counts = [int((index == number).sum()) for number in (0, 1)]
    for measure in ("loss", "abs_loss", "student_mass", "teacher_mass", "tail_mass", "overlap_ratio", "agreement"):
        of_each = [found[f"actor/distillation/{name}/{measure}"] for name in ("big", "small")]
        mean = sum(n * value for n, value in zip(counts, of_each, strict=True)) / sum(counts)
        assert found[f"actor/distillation/{measure}"] == pytest.approx(mean, rel=1e-5)
    for extreme, measure in ((min, "loss_min"), (max, "loss_max")):
        of_each = [found[f"actor/distillation/{name}/{measure}"] for name in ("big", "small")]
        assert found[f"actor/distillation/{measure}"] == extreme(of_each)
    assert found["actor/distillation/loss_min"] <= found["actor/distillation/loss"]
    assert found["actor/distillation/loss_max"] > found["actor/distillation/loss"]
    assert found["actor/distillation/small/loss"] == pytest.approx(0.0, abs=1e-6)  # this teacher is the student
    assert found["actor/distillation/aligned_fraction"] == pytest.approx(sum(counts) / mask.sum())
    assert found["actor/distillation/clamped_fraction"] == 0.0


def test_clamps_that_bite_are_counted(tied_policy: Path, big_teacher: Path, make_batch: Any) -> None:
    batch = taught(make_batch, [big_teacher])
    clamp = DistillationObjectiveOptions(loss="forward_kl", max_loss=1e-4)
    found = MegatronLearner(tied_policy, OPTIONS).train_step(batch, DistillationObjective(clamp))
    assert found.metrics["actor/distillation/clamped_fraction"] > 0.9
    assert found.metrics["actor/distillation/loss"] <= 1e-4


def test_whole_distributions_need_the_teachers_matrices(tied_policy: Path, big_teacher: Path, make_batch: Any) -> None:
    batch = taught(make_batch, [big_teacher])
    for learner in (MegatronLearner(tied_policy, OPTIONS), TorchLearner(tied_policy, OPTIONS)):
        with pytest.raises(DataError, match="load_teacher_heads"):
            learner.train_step(batch, objective("full forward", has_tasks=False))


def test_a_teacher_with_fewer_tokens_gives_no_whole_distribution(
    tied_policy: Path, policy_writer: Any, tmp_path: Path
) -> None:
    teacher = policy_writer(tmp_path / "teacher", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(SettingsError, match="39 tokens, the student 40"):
        MegatronLearner(tied_policy, OPTIONS).load_teacher_heads([teacher])


def test_a_batch_that_no_teacher_has_seen_is_refused(tied_policy: Path, make_batch: Any) -> None:
    for name in ("forward", "k1"):
        with pytest.raises(DataError, match="teacher_"):
            MegatronLearner(tied_policy, OPTIONS).train_step(make_batch(LENGTHS), objective(name, has_tasks=False))


def test_the_teacher_says_what_plain_torch_computes(big_teacher: Path, make_batch: Any) -> None:
    batch = make_batch(LENGTHS)
    model = MegatronTeacherModel(big_teacher, OPTIONS)
    logprobs, tokens, hidden = model.score(batch, top_k=7, temperature=0.7, has_hidden=True)
    plain = TorchLearner(big_teacher, OPTIONS)
    np.testing.assert_allclose(logprobs.values[:, 0], plain.logprobs(batch, temperature=0.7).values, rtol=0, atol=1e-5)
    head = plain.export_weights()["model.embed_tokens.weight"]
    whole = torch.log_softmax(torch.from_numpy(hidden.values) @ head.T / 0.7, -1)
    values, ids = whole.topk(7, -1)
    later = np.flatnonzero(np.arange(len(tokens.values)) != 0)
    later = np.setdiff1d(later, tokens.offsets[:-1])
    np.testing.assert_array_equal(tokens.values[later, 1:], ids.numpy()[later])
    np.testing.assert_allclose(logprobs.values[later, 1:], values.numpy()[later], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(tokens.values[later, 0], batch.ragged("input_ids").values[later])
    assert (tokens.values[tokens.offsets[:-1]] == -1).all()
    with pytest.raises(SettingsError, match=r"from 0 to 43, .* found 44"):
        model.score(batch, top_k=44)


def test_a_split_teacher_says_the_same(big_teacher: Path, make_batch: Any, two_ranks: Any) -> None:
    batch = make_batch(LENGTHS)
    expected = MegatronTeacherModel(big_teacher, OPTIONS).score(batch, top_k=30, has_hidden=True)
    for parallel in (ParallelOptions(ranks=2, tensor=2), ParallelOptions(ranks=2), ParallelOptions(ranks=2, context=2)):
        ranks = two_ranks.in_layout(parallel)
        found = MegatronTeacherModel(big_teacher, OPTIONS, ranks=ranks).score(batch, top_k=30, has_hidden=True)
        np.testing.assert_allclose(found[0].values, expected[0].values, rtol=0, atol=1e-5)
        assert (found[1].values == expected[1].values).mean() > 0.99  # tokens with equal logprobs may swap places
        np.testing.assert_allclose(found[2].values, expected[2].values, rtol=0, atol=1e-5)


def test_as_a_reward_the_advantage_is_the_teachers_log_ratio(
    tied_policy: Path, big_teacher: Path, make_batch: Any
) -> None:
    batch = taught(make_batch, [big_teacher])
    logprobs = TorchLearner(tied_policy, OPTIONS).logprobs(batch)
    batch = batch.with_columns({"rollout_logprobs": logprobs})
    options = DistillationObjectiveOptions(loss="k1", coefficient=2.0, teachers=("big",))
    rewarded, metrics = with_distillation_advantages(batch, options=options)
    is_scored = batch.ragged("teacher_index").values >= 0
    gap = 2.0 * (batch.ragged("teacher_logprobs").values[:, 0] - logprobs.values)
    np.testing.assert_allclose(rewarded.ragged("advantages").values, np.where(is_scored, gap, 0.0), atol=1e-6)
    assert metrics["actor/distillation/loss"] == pytest.approx(-gap[is_scored].mean() / 2, rel=1e-5)
    assert metrics["actor/distillation/big/loss"] == metrics["actor/distillation/loss"]
    both, _ = with_distillation_advantages(batch, options=options, keep_advantages=True)
    np.testing.assert_allclose(
        both.ragged("advantages").values,
        batch.ragged("advantages").values + np.where(is_scored, gap, 0.0),
        atol=1e-6,
    )
    with pytest.raises(SettingsError, match="found 'forward_kl'"):
        with_distillation_advantages(batch, options=DistillationObjectiveOptions())
