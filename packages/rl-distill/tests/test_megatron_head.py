"""The head as one autograd node, compared with log_softmax of full logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_distill.megatron.head import HeadRequest, OutputLayer, head_scores
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives.divergences import DivergenceOptions
from rl_distill.objectives.logit_divergence import LogitDivergence
from rl_distill.objectives.teacher_tokens import TeacherTokens
from rl_distill.objectives.vocabulary import VocabularyPart
from rl_distill.options import LearnerOptions

NUM_TOKENS, NUM_CHANNELS, NUM_ROWS = 13, 6, 24
VOCAB = 21
"""Number of tokens; the remaining rows are padding."""


@pytest.fixture
def arrays() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, targets, and upstream gradients for logprobs and entropy."""
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, NUM_CHANNELS, generator=draw) for rows in (NUM_TOKENS, NUM_ROWS))
    weight[VOCAB:] = 5.0  # padding rows would often have the largest logits
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=draw)
    return hidden, weight, targets, torch.randn(2, NUM_TOKENS, generator=draw)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax((hidden @ weight[:VOCAB].t()).float() / temperature, -1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def learned(
    scores: Callable[..., Any], hidden: Tensor, weight: Tensor, grads: Tensor, *, with_entropy: bool = True
) -> tuple[Tensor, ...]:
    """Return logprobs, entropy, and the gradients of hidden states and weight."""
    leaves = [value.clone().requires_grad_() for value in (hidden, weight)]
    logprobs, entropy = scores(*leaves)
    loss = (grads[0] * logprobs).sum() + ((grads[1] * entropy).sum() if with_entropy else 0.0)
    return (logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_at_once", [1, 5, NUM_TOKENS, 2 * NUM_TOKENS])
def test_chunks_of_any_size_are_the_whole(num_at_once: int, temperature: float, with_entropy: bool, arrays: Any):
    hidden, weight, targets, grads = arrays
    request = HeadRequest(part=VocabularyPart(VOCAB), temperature=temperature, chunk_logits=num_at_once * NUM_ROWS)

    found = learned(
        lambda h, w: head_scores(h, w, targets=targets, request=request)[:2],
        hidden,
        weight,
        grads,
        with_entropy=with_entropy,
    )
    expected = learned(lambda h, w: whole(h, w, targets, temperature), hidden, weight, grads, with_entropy=with_entropy)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not found[3][VOCAB:].any()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("num_at_once", [4, NUM_TOKENS])
def test_several_targets_of_a_token_may_be_equal_or_missing(num_at_once: int, with_entropy: bool, arrays: Any):
    hidden, weight, _, grads = arrays
    draw = torch.Generator().manual_seed(4)
    targets = torch.randint(0, VOCAB, (NUM_TOKENS, 4), generator=draw)
    targets[:, 3] = targets[:, 1]
    targets[2:5, 2] = -1
    is_given = targets >= 0
    of_each = torch.randn(NUM_TOKENS, 4, generator=draw) * is_given
    request = HeadRequest(part=VocabularyPart(VOCAB), temperature=0.7, chunk_logits=num_at_once * NUM_ROWS)

    def reference(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logs = torch.log_softmax((h @ w[:VOCAB].t()).double() / 0.7, -1)
        return logs.gather(-1, targets.clamp_min(0)) * is_given, -(logs.exp() * logs).sum(-1)

    def scored(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = head_scores(h, w, targets=targets, request=request)[:2]
        return logprobs * is_given, entropy

    both: Any = (of_each, grads[1])
    found = learned(scored, hidden, weight, both, with_entropy=with_entropy)
    expected = learned(reference, hidden, weight, both, with_entropy=with_entropy)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_finite_differences(arrays: Any):
    hidden, weight, targets, _ = arrays
    request = HeadRequest(part=VocabularyPart(VOCAB), temperature=0.8, chunk_logits=2 * NUM_ROWS)
    leaves = tuple(value.double().requires_grad_() for value in (hidden[:3], weight))

    assert torch.autograd.gradcheck(lambda h, w: head_scores(h, w, targets=targets[:3], request=request)[:2], leaves)


def test_a_likely_target_keeps_its_gradient_in_bfloat16():
    """1 - probability is 2e-5; in bfloat16, the probability rounds to 1."""
    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[11.0], [0.0]], dtype=torch.bfloat16)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    logprobs = head_scores(*leaves, targets=torch.tensor([0]), request=HeadRequest(part=VocabularyPart(2))).logprobs
    _, found = torch.autograd.grad(logprobs.sum(), leaves)

    missing = torch.tensor(-11.0).sigmoid()
    torch.testing.assert_close(found.float(), torch.stack([missing, -missing])[:, None], rtol=1e-2, atol=0)


def test_bfloat16_is_near_float32(arrays: Any):
    hidden, weight, targets, grads = (value.bfloat16() if value.is_floating_point() else value for value in arrays)
    request = HeadRequest(part=VocabularyPart(VOCAB), chunk_logits=5 * NUM_ROWS)

    found = learned(lambda h, w: head_scores(h, w, targets=targets, request=request)[:2], hidden, weight, grads.float())
    expected = learned(lambda h, w: whole(h, w, targets, 1.0), hidden.float(), weight.float(), grads.float())

    assert [value.dtype for value in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("is_tied", [False, True])
def test_megatrons_buffer_gets_the_gradient(is_tied: bool, arrays: Any):
    hidden, weight, targets, grads = arrays
    request = HeadRequest(part=VocabularyPart(VOCAB), chunk_logits=5 * NUM_ROWS)
    parameter: Any = torch.nn.Parameter(weight.clone())
    parameter.main_grad, parameter.zero_out_wgrad = torch.ones_like(weight), is_tied
    parameter.grad_added_to_main_grad = False

    for _ in range(2):  # two micro-batches
        logprobs, entropy = head_scores(hidden, parameter, targets=targets, request=request)[:2]
        ((grads[0] * logprobs).sum() + (grads[1] * entropy).sum()).backward()
    expected = learned(lambda h, w: whole(h, w, targets, 1.0), hidden, weight, grads)[3]

    torch.testing.assert_close(parameter.main_grad - 1.0, 2 * expected, rtol=1e-5, atol=1e-5)
    # Megatron ignores a parameter's gradient outside its buffer, except for a tied embedding.
    assert (parameter.grad is None) == is_tied
    assert parameter.grad_added_to_main_grad is not is_tied


@pytest.mark.parametrize("num_at_once", [4, NUM_TOKENS])
def test_likeliest_tokens_and_teachers_come_with_it(num_at_once: int, arrays: Any):
    hidden, weight, targets, grads = arrays
    part = VocabularyPart(VOCAB)
    teacher = TeacherTokens.from_top_k(
        torch.stack([torch.randperm(VOCAB)[:3] for _ in targets]),
        (torch.rand(NUM_TOKENS, 3) - 3.0).sort(-1, descending=True).values,
    )
    divergence = LogitDivergence(options=DivergenceOptions(kind="forward_kl"), part=part)
    request = HeadRequest(
        part=part, temperature=0.7, top_k=3, divergence=divergence, chunk_logits=num_at_once * NUM_ROWS
    )
    leaves = [value.clone().requires_grad_() for value in (hidden, weight)]
    scores = head_scores(*leaves, targets=targets, request=request, teacher=teacher)
    assert scores.comparison is not None
    assert scores.top_logprobs is not None
    assert scores.top_ids is not None
    found = torch.autograd.grad((grads * torch.stack([scores.logprobs, scores.comparison.losses])).sum(), leaves)

    logits = leaves[0] @ leaves[1].t()
    expected = divergence(logits, teacher)
    top = torch.log_softmax(logits[:, :VOCAB] / 0.7, -1).topk(3)
    logprobs, _ = whole(*leaves, targets, 0.7)
    wanted = torch.autograd.grad((grads * torch.stack([logprobs, expected.losses])).sum(), leaves)

    torch.testing.assert_close(scores.comparison.detached(), expected.detached())
    torch.testing.assert_close(scores.top_logprobs, top.values.detach())
    assert torch.equal(scores.top_ids, top.indices)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_no_token_at_all_has_a_gradient_of_zeros(arrays: Any):
    _, weight, targets, _ = arrays
    leaves = torch.zeros(0, NUM_CHANNELS, requires_grad=True), weight.requires_grad_()
    scores = head_scores(*leaves, targets=targets[:0], request=HeadRequest(part=VocabularyPart(VOCAB), top_k=2))

    of_hidden, of_weight = torch.autograd.grad(scores.logprobs.sum() + scores.entropy.sum(), leaves)

    assert of_hidden.shape == (0, NUM_CHANNELS)
    assert not of_weight.any()
    assert scores.top_ids is not None
    assert scores.top_ids.shape == (0, 2)


class _Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(out):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return out


def test_no_array_of_all_logits_is_made():
    num_tokens, channels, vocab, at_once = 64, 2, 50, 8
    leaves = torch.randn(num_tokens, channels, requires_grad=True), torch.randn(vocab, channels, requires_grad=True)
    request = HeadRequest(part=VocabularyPart(vocab), top_k=2, chunk_logits=at_once * vocab)
    with _Largest() as largest:
        scores = head_scores(*leaves, targets=torch.zeros(num_tokens, dtype=torch.int64), request=request)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert largest.num_elements == at_once * vocab


def test_megatrons_hooks_see_the_head(untied_policy: Path, make_batch: Any):
    """One of megatron's hooks waits until the weight has been gathered."""
    seen = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(type(module)))
    try:
        MegatronLearner(untied_policy, LearnerOptions()).logprobs(make_batch([5, 3]))
    finally:
        hook.remove()
    assert seen.count(OutputLayer) == 1
