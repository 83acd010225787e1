import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import ShapeError
from rl_distill.objectives import KL_ESTIMATORS

POLICY = torch.tensor([-1.0, -2.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.5, -1.0]),
        ("abs", [0.5, 1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1]),
        ("k1+", [0.5, -1.0]),
        ("abs+", [0.5, 1.0]),
        ("k3+", [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1]),
    ],
)
def test_estimators_equal_literals(name, expected):
    assert KL_ESTIMATORS.get(name)(POLICY, REFERENCE).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_gradients_equal_numeric_ones(name):
    policy = POLICY.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logprobs: KL_ESTIMATORS.get(name)(logprobs, REFERENCE), policy)


@pytest.mark.parametrize("name", ["k2", "k1+", "abs+", "k3+"])
def test_straight_through_has_the_gradient_of_k2(name):
    policy = POLICY.clone().requires_grad_()
    KL_ESTIMATORS.get(name)(policy, REFERENCE).sum().backward()
    assert policy.grad.tolist() == [0.5, -1.0]


def test_straight_through_is_pulled_back_where_k3_is_clamped():
    policy = torch.tensor([-2000.0], requires_grad=True)
    found = KL_ESTIMATORS.get("k3+")(policy, torch.zeros(1))
    found.sum().backward()
    assert found.tolist() == [10.0]
    assert policy.grad.tolist() == [-2000.0]


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_shapes_are_checked(name):
    with pytest.raises(ShapeError, match="reference_logprobs must have the shape"):
        KL_ESTIMATORS.get(name)(POLICY, REFERENCE[:1])


def test_k3_stays_finite_where_the_policy_left_the_reference():
    policy = torch.tensor([-2000.0, 0.0], requires_grad=True)
    found = KL_ESTIMATORS.get("k3")(policy, torch.tensor([0.0, -2000.0]))
    found.sum().backward()
    assert found.tolist() == [10.0, 10.0]
    assert policy.grad.tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_k3_and_abs_are_never_negative(policy, reference):
    pair = torch.tensor([policy]), torch.tensor([reference])
    assert all(float(KL_ESTIMATORS.get(name)(*pair)) >= 0.0 for name in ("abs", "k2", "k3"))


def test_k1_and_k3_are_unbiased_and_their_gradients_as_documented():
    # Exact expectations over a vocabulary of three: each token is weighted with its probability.
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64).log_softmax(0)

    def divergence(forward):
        policy = logits.log_softmax(0)
        return (
            (reference.exp() * (reference - policy)).sum() if forward else (policy.exp() * (policy - reference)).sum()
        )

    def expectation(name):
        policy = logits.log_softmax(0)
        return (policy.exp().detach() * KL_ESTIMATORS.get(name)(policy, reference)).sum()

    for name in ("k1", "k3"):
        assert expectation(name).item() == pytest.approx(divergence(forward=False).item(), rel=1e-10)
    gradients = {name: torch.autograd.grad(expectation(name), logits)[0] for name in ("k1", "k2", "k3")}
    reverse, forward = (torch.autograd.grad(divergence(forward=way), logits)[0] for way in (False, True))
    torch.testing.assert_close(gradients["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradients["k2"], reverse, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(gradients["k3"], forward, atol=1e-12, rtol=1e-10)
