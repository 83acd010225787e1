import math

import pytest
import torch

from rl_core.errors import ShapeError
from rl_distill.objectives import entropy_from_logits, logprobs_from_logits


def test_literals():
    # Probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, math.log(3.0)]] * 2, dtype=torch.float64)
    found = logprobs_from_logits(logits, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(0.25), math.log(0.75)], rel=1e-12)
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy_from_logits(logits).tolist() == pytest.approx([expected] * 2, rel=1e-12)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([1e4, 0.0])
    assert logprobs_from_logits(logits, torch.tensor(1)).item() == -1e4
    assert entropy_from_logits(logits).item() == 0.0


def test_barred_tokens_have_no_entropy_and_no_gradient():
    logits = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy.item() == pytest.approx(math.log(2), rel=1e-12)
    entropy.backward()
    assert logits.grad.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_gradients():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(entropy_from_logits, logits)
    assert torch.autograd.gradcheck(lambda x: logprobs_from_logits(x, torch.tensor([0, 4, 2])), logits)


def test_labels_must_fit():
    with pytest.raises(ShapeError, match=r"logits are \[3, 5\], labels \[2\]"):
        logprobs_from_logits(torch.zeros(3, 5), torch.zeros(2, dtype=torch.int64))
