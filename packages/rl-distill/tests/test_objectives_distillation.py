"""The distillation objective on a micro-batch: loss, gradient and metrics, compared with formulas token by token."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_core import Batch, Ragged
from rl_core.errors import DataError, SettingsError, ShapeError
from rl_core.testing import make_trajectory
from rl_distill.learner import MicroBatch
from rl_distill.objectives import PolicyObjectiveOptions, policy_objective, with_distillation_advantages
from rl_distill.objectives.correction import mismatch_sums
from rl_distill.objectives.distillation import DistillationObjective, DistillationObjectiveOptions, estimate
from rl_distill.objectives.micro_batches import LOSSES, MEASURED, WEIGHTED

STUDENT = (-0.5, -1.0, -2.0, -3.0, -0.25, -4.0, -1.5, -2.0)
TEACHER = (-0.7, -3.0, -2.0, -0.5, -0.25, -9.0, -2.0, -1.0)
INDEX = (0, 1, 0, -1, 1, 0, 1, 0)
MASK = (True, True, True, True, True, True, False, True)
WEIGHTS = (0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 9.0, 0.125)
NAMES = ("large", "small", "idle")
PREFIX = "actor/distillation/"


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def micro_of(**changes):
    ids = torch.arange(len(STUDENT))
    columns = {
        "loss_mask": torch.tensor(MASK),
        "loss_weights": tensor(WEIGHTS),
        "teacher_logprobs": tensor(TEACHER),
        "teacher_index": torch.tensor(INDEX),
    } | changes
    columns = {name: column for name, column in columns.items() if column is not None}
    return MicroBatch(input_ids=ids, position_ids=ids, offsets=torch.tensor([0, 5, 8]), columns=columns)


def evaluated(objective, micro, *, entropy=None):
    student = tensor(STUDENT).requires_grad_()
    loss, sums = objective(student, entropy, micro)
    (gradient,) = torch.autograd.grad(loss, student, allow_unused=True)
    assert not any(one.requires_grad for pair in sums.values() for one in pair)
    return float(loss.detach()), gradient, {name: (float(a), float(b)) for name, (a, b) in sums.items()}


def of_token(name, student, teacher, *, max_loss=math.inf, min_logprob=-math.inf):
    """Return a token's loss, gradient, and whether a clamp changed it."""
    s, t = max(student, min_logprob), max(teacher, min_logprob)
    ratio = t - s
    loss = {"k1": -ratio, "abs": abs(ratio), "k2": ratio**2 / 2, "k3": math.expm1(ratio) - ratio}[name]
    gradient = -math.expm1(ratio) if name == "k3" else -ratio
    passes = loss <= max_loss and student >= min_logprob
    is_clamped = loss > max_loss or student < min_logprob or teacher < min_logprob
    return min(loss, max_loss), gradient * passes, float(is_clamped)


def metrics_of(measured, *, teachers=NAMES, index=INDEX, mask=MASK):
    """Return (sum or extreme, number) of each metric over the tokens that a teacher scored, and over each teacher's."""
    measured = {**measured, "abs_loss": [abs(one) for one in measured["loss"]]}
    tokens = [place for place, number in enumerate(index) if number >= 0 and mask[place]]
    found = {PREFIX + "aligned_fraction": (len(tokens), sum(mask))}
    chosen = {PREFIX: tokens}
    for number, name in enumerate(teachers):
        chosen[f"{PREFIX}{name}/"] = [place for place in tokens if index[place] == number]
    for prefix, places in chosen.items():
        found |= {prefix + name: (sum(of[at] for at in places), len(places)) for name, of in measured.items()}
        losses = [measured["loss"][at] for at in places]
        found[prefix + "loss_min"] = (min(losses, default=math.inf), len(places))
        found[prefix + "loss_max"] = (max(losses, default=-math.inf), len(places))
    return found


BOUNDS = [{}, {"max_loss": 0.5}, {"min_logprob": -2.0}, {"max_loss": 0.5, "min_logprob": -2.0}]
"""A loss of k1, abs and k2 is 0.5 or 2.0, and a logprob is -2, on the bound: neither is clamped."""


def estimated(name, bounds, *, is_scored=tuple(number >= 0 for number in INDEX)):
    tokens = [of_token(name, s, t, **bounds) for s, t in zip(STUDENT, TEACHER, strict=True)]
    of = lambda values: [value if is_in else 0.0 for value, is_in in zip(values, is_scored, strict=True)]
    losses, gradients, clamped = (of(column) for column in zip(*tokens, strict=True))
    measured = {
        "loss": losses,
        "student_mass": of([math.exp(one) for one in STUDENT]),
        "teacher_mass": of([math.exp(one) for one in TEACHER]),
        "tail_mass": of([1 - math.exp(one) for one in TEACHER]),
        "clamped_fraction": clamped,
    }
    return measured, gradients


@pytest.mark.parametrize("with_others", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_estimates_are_the_formulas_of_each_token(name, bounds, with_others):
    options = DistillationObjectiveOptions(loss=name, coefficient=0.5, teachers=NAMES, **bounds)
    micro = micro_of()
    if with_others:  # the sampled token's column comes first
        ids = micro.input_ids
        columns = {
            "teacher_logprobs": torch.stack([tensor(TEACHER), tensor(STUDENT)], 1),
            "teacher_ids": torch.stack([ids, ids + 1], 1).where(torch.tensor(INDEX)[:, None] >= 0, torch.tensor(-1)),
        }
        micro = micro_of(**columns)
    loss, gradient, sums = evaluated(DistillationObjective(options), micro)
    measured, gradients = estimated(name, bounds)
    weights = [weight * is_trained for weight, is_trained in zip(WEIGHTS, MASK, strict=True)]
    assert loss == pytest.approx(0.5 * sum(w * one for w, one in zip(weights, measured["loss"], strict=True)))
    assert gradient.tolist() == pytest.approx([0.5 * w * one for w, one in zip(weights, gradients, strict=True)])
    assert sums == {key: pytest.approx(pair) for key, pair in metrics_of(measured).items()}


def test_an_estimate_is_zero_where_no_teacher_scored():
    options, is_scored = DistillationObjectiveOptions(loss="k1"), torch.tensor(INDEX) >= 0
    found = estimate(tensor(STUDENT), tensor(TEACHER), is_scored, options=options)
    expected = estimated("k1", {})[0]
    assert expected
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values), name


def test_only_estimates_of_the_sampled_token_are_estimates():
    options = DistillationObjectiveOptions(loss="js")
    with pytest.raises(SettingsError, match=r"one of k1, abs, k2, k3, .* found 'js'"):
        estimate(tensor(STUDENT), tensor(TEACHER), torch.tensor(INDEX) >= 0, options=options)


@pytest.mark.parametrize("is_alone", [False, True])
def test_divergences_are_those_that_the_learner_measured(is_alone):
    options = DistillationObjectiveOptions(loss="js", coefficient=2.0, teachers=NAMES[:1], beta=0.25, max_loss=3.0)
    names = ("losses", "student_mass", "teacher_mass", "tail_mass", "overlap_ratio", "agreement", "clamped_fraction")
    values = {name: [0.1 * place + number for place in range(8)] for number, name in enumerate(names)}
    columns = {MEASURED + name: tensor(of) for name, of in values.items()}
    columns[LOSSES].requires_grad_(not is_alone)
    columns |= {WEIGHTED: tensor(range(8)).requires_grad_()} if is_alone else {}
    objective = DistillationObjective(options)
    loss, sums = objective(tensor(STUDENT), None, micro_of(**columns))
    weights = [weight * is_trained for weight, is_trained in zip(WEIGHTS, MASK, strict=True)]
    expected = sum(range(8)) if is_alone else sum(w * one for w, one in zip(weights, values["losses"], strict=True))
    assert float(loss.detach()) == pytest.approx(2.0 * expected)
    values["loss"] = values.pop("losses")
    assert {name: tuple(map(float, pair)) for name, pair in sums.items()} == {
        name: pytest.approx(pair) for name, pair in metrics_of(values, teachers=NAMES[:1]).items()
    }
    uld = DistillationObjective(replace(options, loss="uld"))(tensor(STUDENT), None, micro_of(**columns))[1]
    assert {name for name in sums if name not in uld} == {
        PREFIX + teacher + name for teacher in ("", "large/") for name in ("overlap_ratio", "agreement")
    }
    comparison = objective.comparison
    assert (comparison.options.kind, comparison.options.beta, comparison.options.max_loss) == ("js", 0.25, 3.0)
    with_tasks = replace(objective, policy=policy_objective(PolicyObjectiveOptions()))
    assert (comparison.is_alone, with_tasks.comparison.is_alone) == (True, False)
    assert DistillationObjective(DistillationObjectiveOptions(loss="k1")).comparison is None
    assert DistillationObjectiveOptions(loss="k1").divergence.kind == "forward_kl"
    with pytest.raises(DataError, match=r"distillation by js needs the column 'distillation/losses'"):
        objective(tensor(STUDENT), None, micro_of())


def test_texts_of_a_teacher_have_the_loss_of_each_trained_token():
    options = DistillationObjectiveOptions(loss="nll", coefficient=0.5)
    micro = micro_of(teacher_logprobs=None, teacher_index=None)
    loss, gradient, sums = evaluated(DistillationObjective(options), micro)
    weights = [weight * is_trained for weight, is_trained in zip(WEIGHTS, MASK, strict=True)]
    assert loss == pytest.approx(-0.5 * sum(w * one for w, one in zip(weights, STUDENT, strict=True)))
    assert gradient.tolist() == pytest.approx([-0.5 * weight for weight in weights])
    losses = [-one * is_trained for one, is_trained in zip(STUDENT, MASK, strict=True)]
    expected = metrics_of({"loss": losses}, teachers=(), index=[0 if is_trained else -1 for is_trained in MASK])
    assert sums == {name: pytest.approx(pair) for name, pair in expected.items()}


@pytest.mark.parametrize("old", [None, tensor(STUDENT) - 0.1])
def test_alone_it_tells_entropy_and_mismatch_as_the_policy_objective_does(old):
    options, entropy = DistillationObjectiveOptions(loss="k2"), tensor(range(8)).requires_grad_()
    rollout = tensor(STUDENT) + 0.05
    columns = {"rollout_logprobs": rollout} | ({} if old is None else {"old_logprobs": old})
    _, _, sums = evaluated(DistillationObjective(options), micro_of(**columns), entropy=entropy)
    weights = [weight * is_trained for weight, is_trained in zip(WEIGHTS, MASK, strict=True)]
    assert sums["actor/entropy"] == pytest.approx((sum(w * n for n, w in enumerate(weights)), sum(weights)))
    learned = tensor(STUDENT) if old is None else old
    for name, pair in mismatch_sums(learned, rollout, torch.tensor(MASK), micro_of().offsets).items():
        assert sums[name] == pytest.approx(tuple(map(float, pair)))
    plain = evaluated(DistillationObjective(options), micro_of())[2]
    assert plain.keys() == {name for name in sums if name.startswith(PREFIX)}


def test_with_tasks_both_losses_are_added():
    options = DistillationObjectiveOptions(loss="k2", coefficient=0.5)
    policy = policy_objective(PolicyObjectiveOptions(entropy_coefficient=0.1))
    micro, entropy = micro_of(advantages=tensor(range(8))), tensor(range(8))
    alone = evaluated(DistillationObjective(options), micro)
    tasks = evaluated(policy, micro, entropy=entropy)
    both = evaluated(DistillationObjective(options, policy), micro, entropy=entropy)
    assert both[0] == pytest.approx(alone[0] + tasks[0])
    torch.testing.assert_close(both[1], alone[1] + tasks[1])
    assert both[2] == tasks[2] | alone[2]


def test_what_is_missing_or_of_another_shape_is_refused():
    objective = DistillationObjective(DistillationObjectiveOptions(loss="k1"))
    for name in ("loss_mask", "loss_weights", "teacher_index", "teacher_logprobs"):
        with pytest.raises(DataError, match=f"distillation needs the column '{name}'"):
            objective(tensor(STUDENT), None, micro_of(**{name: None}))
    for change, said in (({"loss_weights": tensor([1.0])}, "loss_weights"), ({"teacher_logprobs": tensor([1.0])}, "t")):
        with pytest.raises(ShapeError, match=f"{said}.* must have shape"):
            objective(tensor(STUDENT), None, micro_of(**change))
    with pytest.raises(ShapeError, match="policy_logprobs must have shape"):
        objective(tensor(STUDENT[:1]), None, micro_of())


def batch_of():
    batch = Batch.from_trajectories([make_trajectory("p", 0), make_trajectory("p", 1, num_response_tokens=4)])
    mask = batch.ragged("loss_mask")
    drawn = np.random.default_rng(0).normal(-2, 1, (3, len(mask.values))).astype(np.float32)
    index = np.where(mask.values, np.arange(len(mask.values)) % 3 - 1, -1).astype(np.int16)
    columns = {"teacher_logprobs": drawn[0], "old_logprobs": drawn[1], "rollout_logprobs": drawn[2]}
    columns |= {"teacher_index": index, "advantages": np.where(mask.values, 1.0, 0.0).astype(np.float32)}
    return batch.with_columns({name: Ragged(values, mask.offsets) for name, values in columns.items()})


@pytest.mark.parametrize("keep", [None, False, True])
@pytest.mark.parametrize("column", [None, "old_logprobs", "rollout_logprobs"])
def test_an_advantage_is_less_by_the_estimate(column, keep):
    batch, options = batch_of(), DistillationObjectiveOptions(loss="k1", coefficient=0.5, teachers=("a", "b"))
    chosen = {"policy_logprobs": column, "keep_advantages": keep}
    found, metrics = with_distillation_advantages(
        batch, options=options, **{name: value for name, value in chosen.items() if value is not None}
    )
    mask, index = batch.ragged("loss_mask").values, batch.ragged("teacher_index").values
    k1 = batch.ragged(column or "rollout_logprobs").values - batch.ragged("teacher_logprobs").values
    k1 = np.where(mask & (index >= 0), k1, 0.0)
    expected = -0.5 * k1 + (batch.ragged("advantages").values if keep else 0.0)
    np.testing.assert_allclose(found.ragged("advantages").values, expected, rtol=1e-6)
    assert found.ragged("advantages").dtype == np.float32
    sums = metrics_of({"loss": k1.tolist()}, teachers=("a", "b"), index=index.tolist(), mask=mask.tolist())
    for name, (total, count) in sums.items():
        is_extreme = name.endswith(("_min", "_max"))
        assert metrics[name] == pytest.approx(total if is_extreme else total / count, rel=1e-5), name
