import math

import pytest
import torch

from rl_core.errors import SettingsError
from rl_distill.objectives import PolicyTokens
from rl_distill.objectives.policy_losses import sapo


def tokens_of(ratios, advantages):
    policy = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    return policy, PolicyTokens(
        policy_logprobs=policy,
        old_logprobs=torch.zeros_like(policy),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(ratios), dtype=torch.bool),
        offsets=torch.tensor([0, len(ratios)]),
    )


def test_sapo_equals_a_literal():
    _, tokens = tokens_of([1.0, 3.0], [2.0, -1.0])
    found = sapo(tokens, tau_positive=1.0, tau_negative=2.0)
    # At ratio 1: 4 * sigmoid(0) = 2 times the advantage. At ratio 3: 2 * sigmoid(4).
    assert found.losses.tolist() == pytest.approx([-4.0, 2.0 / (1.0 + math.exp(-4.0))])


def test_gradient_on_policy_is_the_policy_gradient_and_fades_far_from_it():
    policy, tokens = tokens_of([1.0, 1.0, 30.0], [2.0, -1.0, 1.0])
    sapo(tokens).losses.sum().backward()
    assert policy.grad.tolist() == pytest.approx([-2.0, 1.0, 0.0], abs=1e-9)


@pytest.mark.parametrize("options", [{"tau_positive": 0.0}, {"tau_negative": -1.0}, {"tau_negative": float("inf")}])
def test_impossible_steepness_is_refused(options):
    with pytest.raises(SettingsError, match=r"tau_\w+tive of sapo must be a finite number above 0"):
        sapo(tokens_of([1.0], [1.0])[1], **options)
