"""Divergences between teacher and student: literals, golden numbers, float64 gradients, top k and full."""

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError, NotReadyError, SettingsError, ShapeError
from rl_distill.learner import MicroBatch
from rl_distill.objectives import DistillationObjective, DistillationObjectiveOptions
from rl_distill.objectives.chunked_head import chunked_head_divergence
from rl_distill.objectives.divergences import DivergenceOptions, divergence_terms, top_k_divergence
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.teacher_tokens import TeacherTokens, check_sampled_tokens, refuse_top_k_alone, teacher_tokens
from rl_distill.objectives.vocabulary import VocabularyPart, likeliest

GOLDEN_DIR = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parents[3] / "tests" / "golden"))
FILES = sorted(GOLDEN_DIR.glob("*.npz"))
KINDS = ("forward_kl", "reverse_kl", "js")
TAILS = ("bucket", "drop", "renormalise")
V = 11


def teacher_of(logits: torch.Tensor, *, k: int, temperature: float = 1.0) -> TeacherTokens:
    """Return the scores of a teacher with these logits as hidden states and an identity head."""
    logprobs = torch.log_softmax(logits / temperature, -1)
    values, ids = logprobs.topk(k, -1)
    tokens = torch.arange(len(logits)).unsqueeze(1) % logits.shape[1]
    return TeacherTokens(
        logprobs=torch.cat([logprobs.gather(-1, tokens), values], 1),
        ids=torch.cat([tokens, ids], 1),
        index=torch.zeros(len(logits), dtype=torch.int64),
        hidden=logits,
    )


def divergence(options: DivergenceOptions, *, size: int = V, dtype: torch.dtype = torch.float64) -> LogitDivergence:
    return LogitDivergence(options=options, part=VocabularyPart(size), heads=[torch.eye(size, dtype=dtype)])


def random_logits(rows: int, *, size: int = V, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


P, Q = (0.5, 0.3, 0.1, 0.1), (0.2, 0.5, 0.2, 0.1)
"""Teacher and student on four tokens; the top 2 are the first two."""


def literal(kind: str, tail: str) -> float:
    """Compute a divergence by hand for P and Q."""
    p, q = {
        "bucket": ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3)),
        "drop": ((0.5, 0.3), (0.2, 0.5)),
        "renormalise": ((0.625, 0.375), (2 / 7, 5 / 7)),
        "full": (P, Q),
    }[tail]
    if kind == "forward_kl":
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    if kind == "reverse_kl":
        return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    m = [0.25 * a + 0.75 * b for a, b in zip(p, q, strict=True)]
    to_p = sum(a * math.log(a / c) for a, c in zip(p, m, strict=True))
    to_q = sum(b * math.log(b / c) for b, c in zip(q, m, strict=True))
    return 0.25 * to_p + 0.75 * to_q


HAND_COMPUTED = {
    ("forward_kl", "bucket"): 0.2238047,
    ("forward_kl", "drop"): 0.3048977,
    ("forward_kl", "full"): 0.2355830,
    ("reverse_kl", "bucket"): 0.1937936,
    ("reverse_kl", "full"): 0.2107840,
}
"""Values computed by hand, such as 0.5 ln 2.5 + 0.3 ln 0.6 + 0.2 ln (2/3)."""


@pytest.mark.parametrize(("kind", "tail"), [*itertools.product(KINDS, TAILS), *((kind, "full") for kind in KINDS)])
def test_two_distributions_diverge_as_computed_by_hand(kind: str, tail: str) -> None:
    options = (
        DivergenceOptions(kind=kind, distribution="full", beta=0.25)
        if tail == "full"
        else DivergenceOptions(kind=kind, tail=tail, beta=0.25)
    )
    student, teacher = (torch.tensor([of], dtype=torch.float64).log() for of in (Q, P))
    found = divergence(options, size=4)(student, teacher_of(teacher, k=2))
    assert float(found.losses) == pytest.approx(literal(kind, tail), rel=1e-9)
    if (kind, tail) in HAND_COMPUTED:
        assert float(found.losses) == pytest.approx(HAND_COMPUTED[kind, tail], abs=1e-6)
    masses = (1.0, 1.0, 0.0) if tail == "full" else (0.7, 0.8, 0.2)
    assert [float(of) for of in (found.student_mass, found.teacher_mass, found.tail_mass)] == pytest.approx(masses)
    assert float(found.agreement) == 0.0
    assert float(found.overlap_ratio) in (0.5, 1.0)  # 0.2 occurs twice: either may be in the student's top 2


def test_sorted_probabilities_are_compared_whatever_their_tokens() -> None:
    student, teacher = (torch.tensor([of], dtype=torch.float64).log() for of in (Q, P))
    found = divergence(DivergenceOptions(kind="uld", tail="drop"), size=4)(student, teacher_of(teacher, k=3))
    assert float(found.losses) == pytest.approx(0.0 + 0.1 + 0.1)  # 0.5, 0.3, 0.1 compared with 0.5, 0.2, 0.2
    foreign = TeacherTokens(
        logprobs=torch.tensor([[0.5, 0.5, 0.3, 0.1]], dtype=torch.float64).log(),
        ids=torch.tensor([[9000, 9000, 17000, 40000]]),  # ids of another vocabulary
        index=torch.zeros(1, dtype=torch.int64),
    )
    same = divergence(DivergenceOptions(kind="uld", tail="drop"), size=4)(student, foreign)
    assert float(same.losses) == pytest.approx(0.2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_top_k_without_a_tail_is_the_golden_divergence(path: Path, dtype: torch.dtype) -> None:
    with np.load(path, allow_pickle=False) as arrays:
        logits, logprobs = (torch.from_numpy(arrays[name]) for name in ("logits", "teacher_topk_logprobs"))
        ids = torch.from_numpy(arrays["teacher_topk_ids"]).flatten(0, 1)
        expected = torch.from_numpy(arrays["distill/forward_kl_topk_unclamped"]).flatten()
    logits, logprobs = logits.flatten(0, 1).to(dtype), logprobs.flatten(0, 1).to(dtype)
    teacher = TeacherTokens(
        logprobs=torch.cat([logprobs[:, :1], logprobs], 1),
        ids=torch.cat([ids[:, :1], ids], 1),
        index=torch.zeros(len(ids), dtype=torch.int64),
    )
    found = divergence(DivergenceOptions(tail="drop"), size=logits.shape[1])(logits, teacher)
    torch.testing.assert_close(found.losses.float(), expected, rtol=1e-5, atol=1e-6)


CASES = [
    *itertools.product(KINDS, ["top_k"], TAILS, [1.0, 0.7]),
    *itertools.product(KINDS, ["full"], ["bucket"], [1.0, 0.7]),
    *itertools.product(["uld"], ["top_k"], TAILS, [1.0]),
]


@pytest.mark.parametrize(("kind", "distribution", "tail", "temperature"), CASES)
def test_gradients_are_those_of_finite_differences(kind: str, distribution: str, tail: str, temperature: float) -> None:
    options = DivergenceOptions(kind=kind, distribution=distribution, tail=tail, temperature=temperature, beta=0.3)
    teacher = teacher_of(random_logits(5, seed=1), k=4, temperature=temperature)
    teacher.ids[0, 3:], teacher.logprobs[0, 3:] = -1, 0.0  # a ragged top k with fewer entries
    student = random_logits(5, seed=2).requires_grad_()
    compare = divergence(options)
    assert torch.autograd.gradcheck(lambda logits: compare(logits, teacher).losses, student)


def test_a_head_in_chunks_gives_its_gradients_once() -> None:
    hidden = random_logits(3, size=6).requires_grad_()
    found = chunked_head_divergence(
        hidden,
        random_logits(V, size=6),
        weights=torch.ones(3, dtype=torch.float64),
        teacher=teacher_of(random_logits(3), k=2),
        divergence=divergence(DivergenceOptions()),
    )
    found.weighted.sum().backward(retain_graph=True)
    with pytest.raises(NotReadyError, match="backward only once"):
        found.weighted.sum().backward()


def test_a_head_in_bfloat16_compares_in_float32() -> None:
    logits, head = random_logits(3, dtype=torch.float32).bfloat16(), torch.eye(V)
    teacher = teacher_of(random_logits(3, seed=2, dtype=torch.float32), k=2)
    given = {"weights": torch.ones(3), "teacher": teacher, "targets": teacher.ids[:, 0]}
    compare = divergence(DivergenceOptions(), dtype=torch.float32)
    found = chunked_head_divergence(logits, head.bfloat16(), divergence=compare, **given)
    expected = chunked_head_divergence(logits.float(), head, divergence=compare, **given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_head_in_chunks_refuses_losses_that_are_weighted_again() -> None:
    teacher = teacher_of(random_logits(3), k=2)
    hidden = random_logits(3, size=6).requires_grad_()
    found = chunked_head_divergence(
        hidden,
        random_logits(V, size=6),
        weights=torch.ones(3, dtype=torch.float64),
        teacher=teacher,
        divergence=divergence(DivergenceOptions()),
    )
    with pytest.raises(ShapeError, match="sum them"):
        (found.weighted * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize(("kind", "tail"), [*itertools.product(KINDS, TAILS)])
def test_the_top_of_all_tokens_is_the_whole_distribution(kind: str, tail: str) -> None:
    student, teacher = random_logits(6, seed=2), random_logits(6, seed=1)
    top = divergence(DivergenceOptions(kind=kind, tail=tail))(student, teacher_of(teacher, k=V))
    whole = divergence(DivergenceOptions(kind=kind, distribution="full"))(student, teacher_of(teacher, k=V))
    torch.testing.assert_close(top.losses, whole.losses, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "distribution", "tail", "temperature"), CASES)
def test_a_student_that_is_its_teacher_loses_nothing(
    kind: str, distribution: str, tail: str, temperature: float
) -> None:
    logits = random_logits(50, seed=1, size=300, dtype=torch.float32) * 3
    options = DivergenceOptions(kind=kind, distribution=distribution, tail=tail, temperature=temperature)
    student = logits.clone().requires_grad_()
    compare = divergence(options, size=300, dtype=torch.float32)
    found = compare(student, teacher_of(logits, k=20, temperature=temperature))
    assert float(found.losses.detach().abs().max()) < 1e-6
    assert bool((found.agreement == 1).all())
    assert bool((found.overlap_ratio == 1).all())
    if tail == "drop" and kind != "js":
        return  # only the total mass has a gradient: see the next test
    if kind == "uld":
        return  # |p - q| has no derivative at p = q, where rounding decides
    found.losses.mean().backward()
    assert float(student.grad.abs().max()) < 1e-6


def test_without_a_tail_an_equal_student_is_still_drawn_into_the_top_k() -> None:
    """By hand, the derivative of sum p (log p - log q) over the top k alone is (mass - 1) p at these tokens."""
    logits = random_logits(3, seed=1)
    student = logits.clone().requires_grad_()
    teacher = teacher_of(logits, k=4)
    divergence(DivergenceOptions(tail="drop"))(student, teacher).losses.sum().backward()
    p = torch.softmax(logits, -1)
    mass = p.gather(-1, teacher.ids[:, 1:]).sum(-1, keepdim=True)
    at_top = torch.zeros_like(p).scatter(-1, teacher.ids[:, 1:], 1.0)
    torch.testing.assert_close(student.grad, mass * p - at_top * p)


@given(
    teacher=st.lists(st.floats(-30, 30), min_size=V, max_size=V),
    student=st.lists(st.floats(-30, 30), min_size=V, max_size=V),
    kind=st.sampled_from(KINDS),
    tail=st.sampled_from(["bucket", "renormalise"]),
    k=st.integers(1, V),
)
def test_divergences_are_never_negative_and_always_finite(
    teacher: list[float], student: list[float], kind: str, tail: str, k: int
) -> None:
    options = DivergenceOptions(kind=kind, tail=tail)
    logits = torch.tensor([student], dtype=torch.float32).requires_grad_()
    taught = teacher_of(torch.tensor([teacher], dtype=torch.float32), k=k)
    found = divergence(options, dtype=torch.float32)(logits, taught)
    found.losses.sum().backward()
    assert float(found.losses.detach()) >= -1e-5
    assert bool(logits.grad.isfinite().all())
    assert float(logits.grad.sum().abs()) < 1e-3  # a constant added to all logits does not change the loss
    whole = divergence(DivergenceOptions(kind=kind, distribution="full"), dtype=torch.float32)
    assert float(found.losses.detach()) <= float(whole(logits.detach(), taught).losses) + 1e-3 or tail == "renormalise"


def test_clamps_are_off_and_counted_where_they_bite() -> None:
    student, teacher = random_logits(40, seed=2) * 3, random_logits(40, seed=1) * 3
    taught = teacher_of(teacher, k=4)
    free = divergence(DivergenceOptions())(student, taught)
    assert not bool(free.clamped_fraction.any())
    largest = float(free.losses.median())
    clamped = divergence(DivergenceOptions(max_loss=largest))(student.requires_grad_(), taught)
    torch.testing.assert_close(clamped.losses, free.losses.clamp(max=largest))
    assert torch.equal(clamped.clamped_fraction == 1, free.losses > largest)
    clamped.losses.sum().backward()
    assert not bool(student.grad[free.losses > largest].any())
    low = divergence(DivergenceOptions(min_logprob=-5.0))(student.detach(), taught)
    log_q = torch.log_softmax(student.detach(), -1).gather(-1, taught.ids[:, 1:])
    tails = [1 - of.exp().sum(-1) for of in (log_q, taught.logprobs[:, 1:])]
    bites = (log_q < -5).any(-1) | (taught.logprobs[:, 1:] < -5).any(-1) | sum(of.log() < -5 for of in tails).bool()
    assert torch.equal(low.clamped_fraction == 1, bites)


@pytest.mark.parametrize("kind", [*KINDS, "uld"])
@pytest.mark.parametrize("distribution", ["top_k", "full"])
def test_measures_compare_the_likeliest_tokens_of_both(kind: str, distribution: str) -> None:
    if (kind, distribution) == ("uld", "full"):
        return
    k = 4 if distribution == "top_k" else V // 2
    student, teacher = random_logits(9, seed=2) * 2, random_logits(9, seed=1) * 2
    student[:3] += 4 * teacher[:3]  # nearly alike
    taught = teacher_of(teacher, k=4)
    taught.ids[4, 3:], taught.logprobs[4, 3:] = -1, 0.0  # only two of its top tokens
    taught.ids[5, 1:], taught.logprobs[5, 1:] = -1, 0.0  # none
    taught.index[7] = -1
    found = divergence(DivergenceOptions(kind=kind, distribution=distribution))(student, taught)
    p, q = (of.softmax(-1) for of in (teacher, student))
    for row in range(9):
        best = q[row].topk(k).indices.tolist()
        ids = [one for one in taught.ids[row, 1:].tolist() if one >= 0]
        given = len(ids)
        ids = p[row].topk(k).indices.tolist() if distribution == "full" else ids
        compared = best[:given] if kind == "uld" else ids
        masses = (1.0, 1.0) if distribution == "full" else (float(q[row, compared].sum()), float(p[row, ids].sum()))
        expected = {
            "student_mass": masses[0],
            "teacher_mass": masses[1],
            "tail_mass": 1 - masses[1],
            "overlap_ratio": len({*ids} & {*best}) / max(1, len(ids)),
            "agreement": float(ids[:1] == best[:1]),
            "clamped_fraction": 0.0,
        }
        for name, value in expected.items():
            assert float(getattr(found, name)[row]) == pytest.approx(value * (row != 7), abs=1e-6), (row, name)


@pytest.mark.parametrize("distribution", ["top_k", "full"])
def test_a_value_on_a_bound_is_not_clamped(distribution: str) -> None:
    student, teacher = random_logits(6, seed=2) * 2, random_logits(6, seed=1) * 2
    options = {"distribution": distribution, "tail": "drop"}
    compare = divergence(DivergenceOptions(**options))
    losses = compare(student, teacher_of(teacher, k=3)).losses
    for row in range(6):
        one = teacher_of(teacher[row : row + 1], k=3)
        at_least, below = float(losses[row]), float(losses[row]) * (1 - 1e-9)
        for bound, is_clamped in ((at_least, 0.0), (below, 1.0)):
            if bound > 0:
                found = divergence(DivergenceOptions(**options, max_loss=bound))(student[row : row + 1], one)
                assert float(found.clamped_fraction) == is_clamped
        log_p, log_q = (of[row : row + 1].log_softmax(-1) for of in (teacher, student))
        if distribution == "top_k":
            log_p, log_q = one.logprobs[:, 1:], log_q.gather(-1, one.ids[:, 1:])
        lowest = torch.cat([log_p, log_q]).amin(-1)
        bound = float(lowest.min())
        for limit, is_clamped in ((bound - 1e-9, 0.0), (bound + 1e-9, 1.0), (bound / 2, 1.0)):
            found = divergence(DivergenceOptions(**options, min_logprob=limit))(student[row : row + 1], one)
            assert float(found.clamped_fraction) == is_clamped, (row, limit)


def test_an_exact_bound_of_logprobs_is_not_clamped() -> None:
    log_p = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    given = {"is_given": torch.tensor([[True, True]]), "num_tokens": 4}
    tail = torch.tensor([-2.0], dtype=torch.float64)
    for one, other, is_clamped in ((log_p, log_p - 1, True), (log_p, log_p, False), (log_p - 1, log_p, True)):
        options = DivergenceOptions(tail="drop", min_logprob=-2.0)
        assert top_k_divergence(one, other, tail, **given, options=options)[1].tolist() == [is_clamped]
    masked = {**given, "is_given": torch.tensor([[True, False]])}
    assert top_k_divergence(log_p, log_p - 1, tail, **masked, options=options)[1].tolist() == [False]
    only = DivergenceOptions(distribution="full", min_logprob=math.log(0.25))
    even = torch.zeros(1, 4, dtype=torch.float64)
    exact = float(even.log_softmax(-1)[0, 0])
    found = divergence(replace(only, min_logprob=exact), size=4)(even, teacher_of(even, k=2))
    assert float(found.clamped_fraction) == 0.0


def test_shapes_of_logprobs_are_checked() -> None:
    two = torch.zeros(2, 3)
    for shapes in ((two, two[:, :2], two[:, 0]), (two[0], two[0], two[0, 0]), (two, two, two[:1, 0])):
        with pytest.raises(ShapeError, match=r"log_p and log_q must be \[M, K\] and log_q_tail \[M\]"):
            top_k_divergence(*shapes, is_given=two == 0, num_tokens=4, options=DivergenceOptions())


def test_a_token_that_was_left_out_is_in_the_tail_even_where_k_is_the_whole_vocabulary() -> None:
    student, teacher = (torch.tensor([of], dtype=torch.float64).log() for of in (Q, P))
    taught = teacher_of(teacher, k=4)
    taught.ids[0, 3:], taught.logprobs[0, 3:] = -1, 0.0  # the teacher's third and fourth tokens, with 0.1 each
    found = divergence(DivergenceOptions(), size=4)(student, taught)
    assert float(found.losses) == pytest.approx(HAND_COMPUTED["forward_kl", "bucket"], abs=1e-6)


def test_tokens_that_no_teacher_scored_count_for_nothing() -> None:
    student, teacher = random_logits(4, seed=2).requires_grad_(), teacher_of(random_logits(4, seed=1), k=3)
    teacher.index[1], teacher.ids[1], teacher.logprobs[1] = -1, -1, 0.0
    for options in (DivergenceOptions(), DivergenceOptions(distribution="full"), DivergenceOptions(tail="renormalise")):
        found = divergence(options)(student, teacher)
        assert {float(of[1].detach()) for of in found} == {0.0}
        (grad,) = torch.autograd.grad(found.losses.sum(), student)
        assert not bool(grad[1].any())
        assert bool(grad[0].any())


def test_an_entry_that_neither_can_give_adds_nothing() -> None:
    log_p, log_q = (torch.tensor([0.0, -torch.inf], dtype=torch.float64) for _ in range(2))
    for kind in (*KINDS, "uld"):
        assert not bool(divergence_terms(log_p, log_q, DivergenceOptions(kind=kind)).any())


def test_what_a_divergence_needs_is_asked_for() -> None:
    sampled = teacher_of(random_logits(2), k=0)
    with pytest.raises(DataError, match="Score with top_k >= 1"):
        divergence(DivergenceOptions())(random_logits(2), sampled)
    bare = LogitDivergence(options=DivergenceOptions(distribution="full"), part=VocabularyPart(V))
    with pytest.raises(DataError, match="found the hidden states and 0 matrices"):
        bare(random_logits(2), teacher_of(random_logits(2), k=2))
    with pytest.raises(ShapeError, match="M = 2 tokens; found"):
        divergence(DivergenceOptions())(random_logits(3), sampled)
    with pytest.raises(ShapeError, match="at least 12 columns"):
        divergence(DivergenceOptions(), size=V + 1)(random_logits(2), teacher_of(random_logits(2), k=2))
    with pytest.raises(ShapeError, match=r"must be in \[0, 11\]"):
        likeliest(random_logits(2), 12, part=VocabularyPart(V))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "kl"}, "kind"),
        ({"tail": "leave"}, "tail"),
        ({"beta": 0.0}, r"beta .* a number above 0 and below 1"),
        ({"beta": 1.0}, r"beta .* a number above 0 and below 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"max_loss": -1.0}, "max_loss"),
        ({"min_logprob": 1.0}, "min_logprob"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        DivergenceOptions(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_top_k_without_the_sampled_token_is_refused_or_given_apart(kind: str) -> None:
    whole = teacher_of(random_logits(6, seed=1), k=4)
    student, options = random_logits(6, seed=2), DivergenceOptions(kind=kind)
    expected = divergence(options)(student, whole).losses
    top = {"ids": whole.ids[:, 1:], "logprobs": whole.logprobs[:, 1:]}
    with pytest.raises(DataError, match=r"first column .* must be the sampled token's.*TeacherTokens\.from_top_k"):
        divergence(options)(student, TeacherTokens(**top, index=whole.index))
    sampled = (whole.ids[:, 0], whole.logprobs[:, 0])
    for apart in (None, sampled):
        given = TeacherTokens.from_top_k(**top, sampled=apart)
        torch.testing.assert_close(divergence(options)(student, given).losses, expected, rtol=0, atol=0)
    assert torch.equal(TeacherTokens.from_top_k(**top, sampled=sampled).ids, whole.ids)


def test_a_sampled_token_of_id_zero_is_no_top_k_alone_unless_it_is_the_likeliest() -> None:
    logprobs = torch.tensor([[0.3, 0.6], [0.3, 0.3], [0.6, 0.3]]).log()
    tokens = torch.tensor([[0, 1], [1, 0], [0, 1]])
    index = torch.zeros(3, dtype=torch.int64)
    refuse_top_k_alone(TeacherTokens(ids=tokens, logprobs=logprobs, index=torch.tensor([0, 0, -1])))
    with pytest.raises(DataError, match=r"found at token 2 id 0 with -0\.511, .* most likely one, id 1 with -1\.2"):
        refuse_top_k_alone(TeacherTokens(ids=tokens, logprobs=logprobs, index=index))
    with pytest.raises(DataError, match=r"found at token 1 id 2 with -0\.511, .* most likely one, id 0 with -1\.2"):
        refuse_top_k_alone(
            TeacherTokens(ids=torch.tensor([[0, 0], [2, 0], [0, -1]]), logprobs=logprobs[[0, 2, 2]], index=index)
        )


TOP = torch.log_softmax(random_logits(4, seed=1, dtype=torch.float32), -1).topk(3)
IDS, LOGPROBS = TOP.indices, TOP.values
BAD = LOGPROBS.clone()
BAD[2, 1] = math.nan


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ((IDS, LOGPROBS.exp()), DataError, r"logprobs must be at most 0; found \[.*\] at token 0.* not logits or"),
        ((IDS, LOGPROBS.exp() * 0.01), DataError, r"probabilities that sum to at most 1; found 3\.0.* at token 0"),
        ((IDS, random_logits(4)[:, :3] + 5.0), DataError, "logprobs must be at most 0"),
        ((LOGPROBS, IDS), ShapeError, "found ids of torch.float32, logprobs of torch.int64.* swapped"),
        ((IDS.float(), LOGPROBS), ShapeError, "ids and index must have integer dtypes.* found ids of torch.float32"),
        ((IDS > 1, LOGPROBS), ShapeError, "ids"),
        ((IDS, BAD), DataError, r"logprobs must not be NaN; found \[.*nan.*\] at token 2 \(1 such tokens"),
        ((IDS - 5, LOGPROBS), DataError, "ids must be token ids, or -1 for none"),
        ((IDS[None], LOGPROBS[None]), ShapeError, r"must be \[M, K\]; found \[1, 4, 3\].* `ids\[mask\]` and"),
        ((IDS, LOGPROBS[:, :2]), ShapeError, r"must be \[M, K\]"),
        (("a", LOGPROBS), ShapeError, "ids of from_top_k must be a Tensor"),
    ],
)
def test_what_no_teacher_says_is_refused_where_it_is_made(given, error, said) -> None:
    with pytest.raises(error, match=said):
        TeacherTokens.from_top_k(*given)


def test_what_was_not_scored_is_not_looked_at_and_lists_are_tensors() -> None:
    index = torch.tensor([0, 0, -1, 0])
    assert len(TeacherTokens.from_top_k(IDS.where(LOGPROBS == LOGPROBS, IDS), BAD, index=index)) == 4
    impossible = torch.where(index.unsqueeze(-1) < 0, torch.tensor([[-1] * 3]), IDS)
    never = TeacherTokens.from_top_k(impossible.int(), LOGPROBS.where(IDS > 2, -math.inf), index=index)
    assert never.ids.dtype == torch.int64
    assert TeacherTokens.from_top_k([[1, 0]], [[-0.5, -1.0]]).logprobs.tolist() == [[0.0, -0.5, -1.0]]
    half = torch.log_softmax(torch.zeros(1, 1000), -1).bfloat16()
    assert len(TeacherTokens.from_top_k(torch.arange(1000)[None], half)) == 1  # bfloat16 rounds the sum above 1


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        ([0.0100000, -9.0], None),  # rounding
        ([0.0150000, -9.0], "at most 0"),
        ([math.log(0.60), math.log(0.44)], None),
        ([math.log(0.60), math.log(0.48)], "sum to at most 1"),
        ([-math.inf, -1.0], None),
    ],
)
def test_the_rounding_of_a_teacher_is_taken(logprobs: list[float], said: str | None) -> None:
    make = lambda: TeacherTokens.from_top_k(torch.tensor([[3, 4]]), torch.tensor([logprobs]))
    if said is None:
        assert len(make()) == 1
    else:
        with pytest.raises(DataError, match=said):
            make()


def test_the_message_names_the_first_wrong_token_and_shows_few_of_many() -> None:
    logprobs, ids = torch.full((5, 12), -4.0), torch.arange(12).repeat(5, 1)
    ids[[1, 3, 4], 11] = -2
    with pytest.raises(
        DataError, match=r"found \[0, 1, 2, 3, 4, 5, 6, 7\] at token 1 \(2 such tokens in total\)\. Mask"
    ):
        TeacherTokens(logprobs=logprobs, ids=ids, index=torch.tensor([0, 0, 0, -1, 0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index": torch.zeros(3, dtype=torch.int64)}, r"index \[M\]; found \[2, 2\], \[2, 2\] and \[3\]"),
        ({"index": torch.zeros(2)}, "index of torch.float32"),
        ({"index": torch.zeros(2, dtype=torch.bool)}, "index of torch.bool"),
        ({"logprobs": torch.zeros(2, 3)}, r"found \[2, 2\], \[2, 3\]"),
        ({"ids": torch.zeros(2, 0, dtype=torch.int64), "logprobs": torch.zeros(2, 0)}, r"found \[2, 0\]"),
        ({"ids": torch.zeros(2, dtype=torch.int64), "logprobs": torch.zeros(2)}, r"found \[2\], \[2\]"),
    ],
)
def test_a_teachers_data_of_other_shapes_and_dtypes_are_refused(change: dict[str, torch.Tensor], said: str) -> None:
    good = {"ids": torch.ones(2, 2, dtype=torch.int64), "logprobs": torch.full((2, 2), -1.0)}
    with pytest.raises(ShapeError, match=said):
        TeacherTokens(**({**good, "index": torch.zeros(2, dtype=torch.int64)} | change))


def test_tokens_of_a_teacher_are_selected_with_their_hidden_states() -> None:
    teacher = teacher_of(random_logits(5), k=2)
    for rows in (torch.tensor([3, 0]), slice(1, 3)):
        chosen = teacher.select(rows)
        for name in ("ids", "logprobs", "index", "hidden"):
            assert torch.equal(getattr(chosen, name), getattr(teacher, name)[rows])
    assert TeacherTokens.from_top_k(IDS, LOGPROBS).select(slice(2)).hidden is None
    given = TeacherTokens.from_top_k(IDS, LOGPROBS, index=torch.arange(4), hidden=torch.ones(4, 2))
    assert (given.index.tolist(), given.hidden.shape) == ([0, 1, 2, 3], (4, 2))
    assert TeacherTokens.from_top_k(IDS, LOGPROBS).index.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("ids", "logprobs", "index", "is_refused"),
    [
        ([5, 3, 4], [-0.1, -1.0, -2.0], 0, True),
        ([5, 3, 4], [-0.1, -1.0, -2.0], -1, False),  # not scored
        ([3, 3, 4], [-0.1, -1.0, -2.0], 0, False),  # the same token
        ([-1, 3, 4], [0.0, -1.0, -2.0], 0, False),  # no sampled token
        ([5, -1, -1], [-0.1, 0.0, 0.0], 0, False),  # no top
        ([5, 3, 4], [-0.995, -1.0, -2.0], 0, False),  # rounding
        ([5, 3, 4], [-0.985, -1.0, -2.0], 0, True),
    ],
)
def test_a_sampled_token_is_no_likelier_than_the_likeliest(ids, logprobs, index, is_refused) -> None:
    """Another teacher's row comes first, so that the message must name the second."""
    teacher = TeacherTokens(
        ids=torch.tensor([[1, 1, 2], ids]),
        logprobs=torch.tensor([[-0.5, -0.5, -1.5], logprobs]).double(),
        index=torch.tensor([0, index]),
    )
    if is_refused:
        with pytest.raises(DataError, match=r"at token 1 id 5 with -0\.\d+, more likely than .*, id 3 with -1"):
            divergence(DivergenceOptions())(random_logits(2), teacher)
    else:
        assert divergence(DivergenceOptions())(random_logits(2), teacher) is not None


def test_ids_above_the_vocabulary_count_only_where_a_teacher_scored() -> None:
    teacher = teacher_of(random_logits(4), k=2)
    teacher.ids[2, 1], teacher.index[2] = V, -1
    divergence(DivergenceOptions())(random_logits(4), teacher)
    teacher.ids[[1, 3], 2] = torch.tensor([V + 5, V])
    with pytest.raises(DataError, match=r"below 11, .* found 16 at token 1 \(2 such tokens in total\)"):
        divergence(DivergenceOptions())(random_logits(4), teacher)
    divergence(DivergenceOptions(distribution="full"))(random_logits(4), teacher)


def test_logits_that_do_not_fit_the_teacher_are_refused() -> None:
    teacher, compare = TeacherTokens.from_top_k(IDS, LOGPROBS), divergence(DivergenceOptions())
    with pytest.raises(ShapeError, match=r"\[M, V\] .* M = 4 tokens; found \[2, 2, 11\].*`logits\[mask\]`"):
        compare(random_logits(4).reshape(2, 2, V), teacher)
    with pytest.raises(ShapeError, match=r"found \[3, 11\]"):
        compare(random_logits(3), teacher)
    foreign = TeacherTokens.from_top_k(torch.where(IDS[2, 0] == IDS, V, IDS), LOGPROBS)
    with pytest.raises(DataError, match=r"ids must be below 11, .*; found 11 at token .*uld"):
        compare(random_logits(4), foreign)
    assert len(divergence(DivergenceOptions(kind="uld"))(random_logits(4), foreign).losses) == 4


def test_a_head_that_knows_the_tokens_refuses_the_teachers_words_on_others() -> None:
    teacher = teacher_of(random_logits(6, seed=1), k=4)
    given = {"weights": torch.ones(6, dtype=torch.float64), "divergence": divergence(DivergenceOptions())}
    hidden, head = random_logits(6, seed=2), torch.eye(V, dtype=torch.float64)
    found = chunked_head_divergence(hidden, head, teacher=teacher, targets=teacher.ids[:, 0], **given)
    assert found.logprobs is not None
    with pytest.raises(DataError, match=r"found id 0 instead of 1 at token 0 \(6 such tokens"):
        chunked_head_divergence(hidden, head, teacher=teacher, targets=teacher.ids[:, 0] + 1, **given)


def test_columns_of_a_batch_need_the_sampled_token_first() -> None:
    teacher = teacher_of(random_logits(6, seed=1), k=4)
    columns = {
        "loss_mask": torch.ones(6, dtype=torch.bool),
        "loss_weights": torch.ones(6),
        "teacher_logprobs": teacher.logprobs,
        "teacher_ids": teacher.ids,
        "teacher_index": teacher.index,
    }

    def micro(**changed: torch.Tensor) -> MicroBatch:
        positions = torch.arange(6)
        return MicroBatch(
            input_ids=teacher.ids[:, 0], position_ids=positions, offsets=torch.tensor([0, 6]), columns=columns | changed
        )

    alone = {"teacher_ids": teacher.ids[:, 1:], "teacher_logprobs": teacher.logprobs[:, 1:]}
    assert len(teacher_tokens(micro())) == 6
    some = teacher_tokens(micro(), torch.tensor([4, 1]))
    assert torch.equal(some.ids, teacher.ids[[4, 1]])
    assert some.hidden is None
    with pytest.raises(DataError, match=r"must be the sampled token, followed by the K most likely ones"):
        teacher_tokens(micro(**alone))
    others = torch.tensor([0, 0, 1, 0, 1, 0]) + teacher.ids[:, 0]
    check_sampled_tokens(teacher.ids[:, 0], others, others == teacher.ids[:, 0])
    found = rf"found id {teacher.ids[2, 0]} instead of {others[2]} at token 2 \(2 such tokens in total\)"
    with pytest.raises(DataError, match=found):
        check_sampled_tokens(teacher.ids[:, 0], others, torch.ones(6, dtype=torch.bool))
    k1 = DistillationObjective(DistillationObjectiveOptions(loss="k1"))
    k1(torch.full((6,), -1.0), None, micro())
    with pytest.raises(DataError, match=r"must be the sampled token, followed by the K most likely ones"):
        k1(torch.full((6,), -1.0), None, micro(**alone))
