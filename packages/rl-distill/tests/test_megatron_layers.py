"""Norm, activation and vocabulary logprobs, compared with torch."""

import types

import pytest
import torch
import torch.nn.functional as F
from rounding import BFLOAT16, rounding_bound

from rl_distill.megatron.kernels import Kernels
from rl_distill.megatron.layers import RMSNorm, SwiGLU
from rl_distill.objectives.vocabulary import VocabularyPart, vocabulary_logprobs


def config_of(dtype: torch.dtype = torch.float32, *, is_fused: bool = False) -> types.SimpleNamespace:
    return types.SimpleNamespace(params_dtype=dtype, sequence_parallel=True, kernels=Kernels(is_fused=is_fused))


def norm_of(size: int, dtype: torch.dtype, *, is_fused: bool = False) -> RMSNorm:
    norm = RMSNorm(config_of(dtype, is_fused=is_fused), size, eps=1e-3)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def test_rms_norm_equals_a_literal():
    norm = RMSNorm(config_of(), 2, eps=0.0)

    torch.testing.assert_close(norm(torch.tensor([[3.0, 1.0]])), torch.tensor([[3.0, 1.0]]) / 5.0**0.5)


@pytest.mark.parametrize("is_fused", [False, True])
def test_rms_norm_has_torchs_values_and_gradients(is_fused: bool):
    norm = norm_of(6, torch.float32, is_fused=is_fused)
    x = torch.randn(4, 3, 6, requires_grad=True)
    weights = torch.randn(4, 3, 6)

    found = torch.autograd.grad((norm(x) * weights).sum(), (x, norm.weight))
    reference = F.rms_norm(x, (6,), norm.weight, 1e-3)
    expected = torch.autograd.grad((reference * weights).sum(), (x, norm.weight))

    torch.testing.assert_close(norm(x), reference)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_norm_rounds_bfloat16_once(is_fused: bool):
    x = 3 * torch.randn(50, 8, dtype=torch.bfloat16)
    norm = norm_of(8, torch.bfloat16, is_fused=is_fused)

    expected = F.rms_norm(x.double(), (8,), norm.weight.double(), 1e-3)

    # Half a unit in the last place of bfloat16, and the roundings in float32 before it.
    bound = BFLOAT16 / 2 + rounding_bound(1.0, roundings=16)
    torch.testing.assert_close(norm(x).double(), expected, rtol=bound, atol=0)


def test_rms_norm_marks_its_weight_for_sequence_parallelism():
    assert norm_of(4, torch.bfloat16).weight.sequence_parallel is True


def test_swiglu_gates_the_second_half():
    activation = SwiGLU(config_of())
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(activation(x), F.silu(gate) * up)
    assert torch.autograd.gradcheck(activation, (x,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vocabulary_logprobs_and_entropy(temperature: float):
    logits = (3 * torch.randn(7, 11)).requires_grad_()
    targets = torch.randint(0, 11, (7,))
    weights = torch.randn(2, 7)

    logprobs, entropy = vocabulary_logprobs(logits, targets, temperature=temperature)
    found = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), logits)
    reference = torch.log_softmax(logits / temperature, -1)
    chosen = reference.gather(-1, targets[:, None]).squeeze(-1)
    spread = -(reference.exp() * reference).sum(-1)
    expected = torch.autograd.grad((weights[0] * chosen + weights[1] * spread).sum(), logits)

    torch.testing.assert_close(logprobs, chosen)
    torch.testing.assert_close(entropy, spread)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_vocabulary_logprobs_stand_a_forbidden_token():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)

    logprobs, entropy = vocabulary_logprobs(logits, torch.tensor([1]))
    (grad,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)

    torch.testing.assert_close(logprobs, torch.tensor([0.5]).log())
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_tokens_that_pad_the_vocabulary_have_no_probability_and_no_gradient():
    logits = torch.randn(5, 8)
    logits[:, 6:] = 50.0  # far above all other logits
    logits.requires_grad_()
    targets = torch.tensor([0, 5, 2, 3, 1])

    found = vocabulary_logprobs(logits, targets, temperature=0.7, part=VocabularyPart(6))
    (grad,) = torch.autograd.grad(found[0].sum() + found[1].sum(), logits)
    expected = vocabulary_logprobs(logits[:, :6], targets, temperature=0.7)
    (expected_grad,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), logits)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert not grad[:, 6:].any()
