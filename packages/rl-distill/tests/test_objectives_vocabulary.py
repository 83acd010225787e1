"""Logprobs from sliced logits, compared with torch's log_softmax of the whole; threads stand for the ranks."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import ShapeError
from rl_distill.objectives import chunked_head
from rl_distill.objectives.chunked_head import chunked_head_divergence
from rl_distill.objectives.divergences import DivergenceOptions
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.teacher_tokens import TeacherTokens
from rl_distill.objectives.vocabulary import (
    VocabularyPart,
    all_logprobs,
    likeliest,
    take_top_k,
    top_k_logprobs,
    vocabulary_logprobs,
)

V, M = 11, 6
SLICES = {"whole": (1, 11), "padded": (1, 13), "two": (2, 6), "one of padding": (3, 6), "narrow": (4, 3)}
"""Number of ranks, and columns of each; 6 columns of 3 ranks leave nothing but padding to the last."""
IDS = torch.tensor([[3, 0, 10], [7, -1, 2], [-1, -1, -1], [5, 6, -1], [10, 9, 8], [1, 4, 7]])
TARGETS = torch.tensor([0, 10, 5, 6, 3, 7])
GARBAGE = 1e3
"""Logit of padding columns, far above all others."""


@dataclass(frozen=True)
class Group:
    """One rank's view of its process group."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


class Ranks:
    """Threads that exchange tensors where ranks would, through `torch.distributed`."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._barrier = threading.Barrier(count)
        self._given: list[Tensor] = [torch.empty(0)] * count
        self._count = count
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        monkeypatch.setattr(dist, "all_gather", self._all_gather)

    def run(self, work: Callable[[Any, int], Any]) -> list[Any]:
        """Return each rank's result of work(group, number)."""

        def guarded(number: int) -> Any:
            try:
                return work(Group(number, self._count) if self._count > 1 else None, number)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(guarded, range(self._count)))

    def _exchanged(self, tensor: Tensor, group: Group) -> list[Tensor]:
        self._given[group.rank()] = tensor.clone()
        self._barrier.wait(20)
        found = list(self._given)
        self._barrier.wait(20)
        return found

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Group) -> None:
        parts = torch.stack(self._exchanged(tensor, group))
        tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))

    def _all_gather(self, tensors: list[Tensor], tensor: Tensor, *, group: Group) -> None:
        assert tensor.is_contiguous()
        for place, part in zip(tensors, self._exchanged(tensor, group), strict=True):
            place.copy_(part)


@pytest.fixture(params=SLICES)
def sliced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs work(slice of a [..., V] tensor, part) on every rank of a layout."""
    count, width = SLICES[request.param]

    def run(whole: Tensor, work: Callable[[Tensor, VocabularyPart], Any], *, dim: int = -1) -> list[Any]:
        shape = list(whole.shape)
        shape[dim] = count * width - V
        padded = torch.cat([whole.detach(), whole.new_full(shape, GARBAGE)], dim)

        def on_rank(group: Any, number: int) -> Any:
            return work(padded.narrow(dim, number * width, width).clone(), VocabularyPart(V, group))

        return Ranks(count, monkeypatch).run(on_rank)

    run.ranks = count  # type: ignore[attr-defined]
    return run


def logits_of(*, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return logits with a tie, a row in which one token has all the probability, and one token that cannot be."""
    logits = 2.0 * torch.randn(M, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[0, 4] = logits[0, 9]
    logits[3, 5] = 2000.0
    logits[5, 2] = -torch.inf
    return logits.to(dtype)


def weights_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def joined(grads: list[Tensor], dim: int = -1) -> Tensor:
    """Join the ranks' gradients; those of padding are 0."""
    whole = torch.cat(grads, dim)
    assert not whole.narrow(dim, V, whole.shape[dim] - V).any()
    return whole.narrow(dim, 0, V)


def entropies(logprobs: Tensor) -> Tensor:
    return -torch.where(logprobs.exp() > 0, logprobs.exp() * logprobs, 0.0).sum(-1)


@pytest.mark.parametrize("wanted", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.5)], ids=["logprobs", "entropy", "both"])
@pytest.mark.parametrize(("temperature", "dtype"), [(1.0, torch.float32), (0.7, torch.float32), (1.0, torch.bfloat16)])
def test_logprobs_and_entropy_are_those_of_log_softmax(sliced, wanted, temperature, dtype):
    logits, (own, spread) = logits_of(dtype=dtype), (weights_of(M), weights_of(2, M)[1])
    of_logprobs, of_entropy = wanted

    def work(part_of, part):
        before, leaf = part_of.clone(), part_of.requires_grad_()
        logprobs, entropy = vocabulary_logprobs(leaf, TARGETS, temperature=temperature, part=part)
        terms = [(of_logprobs, own * logprobs), (of_entropy, spread * entropy)]
        (grad,) = torch.autograd.grad(sum(factor * term.sum() for factor, term in terms if factor), leaf)
        assert torch.equal(leaf.detach(), before), "logits stay as they are"
        assert (logprobs.dtype, grad.dtype) == (torch.float32, dtype)
        return logprobs.detach(), entropy.detach(), grad

    found = sliced(logits, work)
    leaf = logits.double().nan_to_num(neginf=-1e9).requires_grad_()
    whole = (leaf / temperature).log_softmax(-1)
    logprobs, entropy = whole.gather(-1, TARGETS[:, None]).squeeze(1), entropies(whole)
    (grad,) = torch.autograd.grad((of_logprobs * own * logprobs + of_entropy * spread * entropy).sum(), leaf)
    for each in found:
        torch.testing.assert_close(each[0].double(), logprobs.detach(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(each[1].double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(joined([each[2] for each in found]).double(), grad, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_the_top_and_the_rest_are_those_of_log_softmax(sliced, dtype, tolerance, temperature):
    logits, weights, of_tail = logits_of(dtype=dtype), weights_of(M, 3), weights_of(2, M)[1]

    def work(part_of, part):
        before, leaf = part_of.clone(), part_of.requires_grad_()
        logprobs, tail = top_k_logprobs(leaf, IDS, part=part, temperature=temperature)
        (grad,) = torch.autograd.grad((weights * logprobs).sum() + (of_tail * tail).sum(), leaf)
        assert torch.equal(leaf.detach(), before), "logits stay as they are"
        taken = take_top_k(part_of.detach().clone(), IDS, part=part, temperature=temperature)
        torch.testing.assert_close((taken.logprobs, taken.log_tail), (logprobs, tail))
        exponentials = taken.exponentials.clone()
        grads = [taken.gradient(weights.to(dtype), of_tail.to(dtype), in_place=way) for way in (False, True)]
        torch.testing.assert_close(grads[0], grads[1])
        assert torch.equal(grads[1], taken.exponentials)
        assert grads[1] is taken.exponentials or not grads[1].numel()
        assert not torch.equal(exponentials, grads[1]) or not grads[1].numel()
        torch.testing.assert_close(grads[0] / temperature, grad[:, : grads[0].shape[1]])
        return logprobs.detach(), tail.detach(), grad

    found = sliced(logits, work)
    leaf = logits.double().nan_to_num(neginf=-1e9).requires_grad_()
    whole, is_given = (leaf / temperature).log_softmax(-1), IDS >= 0
    logprobs = torch.where(is_given, whole.gather(-1, IDS.clamp_min(0)), 0.0)
    is_outside = torch.ones(M, V + 1, dtype=torch.bool).scatter(-1, IDS.where(is_given, torch.tensor(V)), False)[:, :V]
    tail = whole.masked_fill(~is_outside, -torch.inf).logsumexp(-1)
    has_tail = tail.detach().exp() > 0  # in row 3, all probability is at one of its tokens
    tail = tail.clamp_min(torch.tensor(torch.finfo(dtype).tiny, dtype=torch.float64).log())
    (grad,) = torch.autograd.grad((weights * logprobs).sum() + (of_tail * has_tail * tail).sum(), leaf)
    assert has_tail.tolist() == [True, True, True, False, True, True]
    for each in found:
        assert each[0].dtype == dtype
        torch.testing.assert_close(each[0].double(), logprobs.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(each[1].double(), tail.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(joined([each[2] for each in found]).double(), grad, rtol=tolerance, atol=tolerance)


def test_a_rest_without_tokens_has_no_gradient():
    logits = logits_of().requires_grad_()
    logprobs, rest = top_k_logprobs(logits, torch.arange(V).expand(M, V), part=VocabularyPart(V))
    (found,) = torch.autograd.grad((logprobs * weights_of(M, V)).sum() + 5.0 * rest.sum(), logits)
    (expected,) = torch.autograd.grad((torch.log_softmax(logits, -1) * weights_of(M, V)).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.grad(top_k_logprobs(logits, IDS, part=VocabularyPart(V))[1].sum(), logits)[0].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_all_logprobs_are_those_of_log_softmax(sliced, temperature):
    logits, weights = logits_of().nan_to_num(neginf=-30.0), weights_of(M, V)

    def work(part_of, part):
        leaf = part_of.requires_grad_()
        logprobs = all_logprobs(leaf, part=part, temperature=temperature)
        first = part.first(part_of.shape[1])
        own = weights[:, first : first + logprobs.shape[1]]
        (grad,) = torch.autograd.grad((own * logprobs).sum(), leaf)
        return logprobs.detach(), grad

    found = sliced(logits, work)
    leaf = logits.clone().requires_grad_()
    expected = (leaf / temperature).log_softmax(-1)
    (grad,) = torch.autograd.grad((weights * expected).sum(), leaf)
    torch.testing.assert_close(torch.cat([each[0] for each in found], -1), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(joined([each[1] for each in found]), grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [0, 1, 4, 8, V])
def test_the_likeliest_are_those_of_topk(sliced, k):
    logits = logits_of(seed=3).nan_to_num(neginf=-50.0)
    logits[0, 9] += 0.5  # no ties, whose order is open
    for values, ids in sliced(logits, lambda part_of, part: likeliest(part_of.requires_grad_(), k, part=part)):
        assert not values.requires_grad
        torch.testing.assert_close((values, ids), tuple(logits.topk(k, -1)))


def test_logits_that_are_no_slice_of_the_vocabulary_are_refused():
    part = VocabularyPart(V, Group(0, 2))
    with pytest.raises(ShapeError, match=r"at least 6 columns \(11 tokens, 2 tensor-parallel ranks\); found \[2, 5\]"):
        all_logprobs(torch.zeros(2, 5), part=part)
    with pytest.raises(ShapeError, match=r"logits must be \[M, V\].*found \[2, 2, 6\]"):
        all_logprobs(torch.zeros(2, 2, 6), part=part)
    with pytest.raises(ShapeError, match=r"found \[11\]"):
        all_logprobs(torch.zeros(V), part=VocabularyPart(V))
    for k in (-1, V + 1):
        with pytest.raises(ShapeError, match=rf"k must be in \[0, 11\].*found {k}"):
            likeliest(torch.zeros(2, V), k, part=VocabularyPart(V))


def teacher_of(*, hidden: bool, seed: int = 5) -> tuple[TeacherTokens, list[Tensor]]:
    """Return two teachers' top 3 with their hidden states and heads [V, H]; a token without teacher, a ragged top."""
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(M, 4, generator=draw, dtype=torch.float64)
    heads = [torch.randn(V, width, generator=draw, dtype=torch.float64) for width in (4, 3)]
    index = torch.tensor([0, 1, -1, 0, 1, 1])
    logits = torch.stack([state[: heads[i].shape[1]] @ heads[i].T for state, i in zip(states, index, strict=True)])
    logprobs, tokens = logits.log_softmax(-1), torch.arange(M)[:, None]
    values, ids = logprobs.topk(3, -1)
    ids, values = torch.cat([tokens, ids], 1), torch.cat([logprobs.gather(1, tokens), values], 1)
    ids[4, 3], values[4, 3] = -1, 0.0
    return TeacherTokens(logprobs=values, ids=ids, index=index, hidden=states if hidden else None), heads


def slice_of(whole: Tensor, part: VocabularyPart, width: int) -> Tensor:
    first = part.first(width)
    rows = whole[first : first + width]
    return torch.cat([rows, rows.new_full((width - len(rows), whole.shape[1]), 7.0)])


CASES = [
    *({"kind": kind, "tail": tail} for kind, tail in itertools.product(("forward_kl", "js"), ("bucket", "drop"))),
    {"kind": "uld", "temperature": 0.8},
    {"kind": "reverse_kl", "tail": "renormalise", "temperature": 1.5, "max_loss": 0.3},
    {"kind": "reverse_kl", "distribution": "full", "temperature": 1.5, "min_logprob": -6.0},
    {"kind": "js", "distribution": "full", "beta": 0.2},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_divergences_of_slices_and_chunks_are_those_of_the_whole(sliced, options):
    is_full = options.get("distribution") == "full"
    teacher, heads = teacher_of(hidden=is_full)
    settings, weights = DivergenceOptions(**options), weights_of(M)
    hidden, head = weights_of(M, 5), 0.7 * weights_of(V, 5)

    whole_hidden, whole_head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    compare = LogitDivergence(options=settings, part=VocabularyPart(V), heads=heads if is_full else ())
    expected = compare(whole_hidden @ whole_head.T, teacher)
    grads = torch.autograd.grad((weights * expected.losses).sum(), (whole_hidden, whole_head))
    logprobs = (hidden @ head.T / 0.9).log_softmax(-1)

    def work(part_of, part):
        width = len(part_of)
        own = [slice_of(one, part, width) for one in heads] if is_full else []
        divergence = LogitDivergence(options=settings, part=part, heads=own)
        plain = divergence((hidden @ part_of.T), teacher)
        for name, values in expected._asdict().items():
            torch.testing.assert_close(getattr(plain, name), values.detach(), msg=lambda text, n=name: f"{n}: {text}")
        found = None
        for chunk_logits in (1, 2 * width + 1, 10**6):
            leaf, matrix = hidden.clone().requires_grad_(), part_of.clone().requires_grad_()
            found = chunked_head_divergence(
                leaf,
                matrix,
                weights=weights,
                teacher=teacher,
                divergence=divergence,
                targets=teacher.ids[:, 0],
                temperature=0.9,
                chunk_logits=chunk_logits,
            )
            of_hidden, of_head = torch.autograd.grad(3.0 * found.weighted.sum(), (leaf, matrix))
            torch.testing.assert_close(found.weighted.detach(), (weights * expected.losses).detach())
            torch.testing.assert_close(tuple(found.comparison), tuple(one.detach() for one in expected))
            torch.testing.assert_close(of_hidden, 3.0 * grads[0])
            torch.testing.assert_close(found.logprobs.double(), logprobs.diagonal(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.entropy.double(), entropies(logprobs), rtol=1e-5, atol=1e-6)
        return of_head / 3.0

    torch.testing.assert_close(joined(sliced(head, work, dim=0), dim=0), grads[1])


@pytest.mark.parametrize(("chunk_logits", "sizes"), [(1, [1] * 6), (2 * V, [2] * 3), (5 * V - 1, [4, 2]), (999, [6])])
def test_a_chunk_has_at_most_the_given_number_of_logits(chunk_logits, sizes, monkeypatch):
    teacher, _ = teacher_of(hidden=False)
    seen, one_chunk = [], chunked_head._one_chunk

    def noting(hidden, *others):
        seen.append(len(hidden))
        return one_chunk(hidden, *others)

    monkeypatch.setattr(chunked_head, "_one_chunk", noting)
    divergence = LogitDivergence(options=DivergenceOptions(), part=VocabularyPart(V))
    given = {"teacher": teacher, "divergence": divergence, "chunk_logits": chunk_logits}
    chunked_head_divergence(weights_of(M, 5), weights_of(V, 5), weights=weights_of(M), **given)
    assert seen == sizes
    given["teacher"] = teacher.select(slice(0))
    found = chunked_head_divergence(weights_of(0, 5), weights_of(V, 5), weights=weights_of(0), **given)
    assert (len(found.weighted), len(found.comparison.losses), found.logprobs, found.entropy) == (0, 0, None, None)


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["hidden", "weight"])
def test_a_head_of_which_one_side_trains_computes_its_gradient_alone(trained):
    teacher, _ = teacher_of(hidden=False)
    divergence = LogitDivergence(options=DivergenceOptions(), part=VocabularyPart(V))
    inputs = [weights_of(size, 5).float().requires_grad_(has) for size, has in zip((M, V), trained, strict=True)]
    found = chunked_head_divergence(*inputs, weights=weights_of(M).float(), teacher=teacher, divergence=divergence)
    (2.5 * found.weighted.sum()).backward()
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    (2.5 * weights_of(M) * divergence(leaves[0] @ leaves[1].T, teacher).losses).sum().backward()
    for one, leaf, has in zip(inputs, leaves, trained, strict=True):
        assert (one.grad is not None) == has
        assert not has or torch.allclose(one.grad, leaf.grad, rtol=1e-4, atol=1e-5)
