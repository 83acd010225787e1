import math

import pytest
import torch

from rl_core.errors import SettingsError
from rl_distill.objectives import POLICY_LOSSES, PolicyTokens
from rl_distill.objectives.policy_losses import cispo, dppo_kl, dppo_tv

gpg = POLICY_LOSSES.get("gpg")


def losses_and_gradient(loss, *, policy, old, advantages, **options):
    """Return a loss's result and gradient, given the probabilities of the current and the old policy."""
    logprobs = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    tokens = PolicyTokens(
        policy_logprobs=logprobs,
        old_logprobs=torch.tensor(old, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(policy), dtype=torch.bool),
        offsets=torch.tensor([0, len(policy)]),
    )
    found = loss(tokens, **options)
    found.losses.sum().backward()
    return found, logprobs.grad.tolist()


def test_gpg_equals_a_literal():
    found, gradient = losses_and_gradient(gpg, policy=[0.5, 0.25], old=[0.1, 0.9], advantages=[2.0, -1.0])
    assert found.losses.tolist() == pytest.approx([2.0 * math.log(2), -math.log(4)])
    assert gradient == [-2.0, 1.0]


def test_dro_has_the_gradient_of_the_papers_objective():
    # DRO's objective is half the square of reward - value - tau * log ratio, and ours is that divided by tau = beta.
    beta, policy, old, advantages = 0.3, [0.5, 0.25, 0.9], [0.1, 0.8, 0.9], [2.0, -1.0, 0.5]
    logprobs = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    log_ratio = logprobs - torch.tensor(old, dtype=torch.float64).log()
    residuals = torch.tensor(advantages, dtype=torch.float64) - beta * log_ratio
    (0.5 / beta * residuals.square()).sum().backward()
    dro = POLICY_LOSSES.get("dro")
    found, gradient = losses_and_gradient(dro, policy=policy, old=old, advantages=advantages, beta=beta)
    assert gradient == pytest.approx(logprobs.grad.tolist(), abs=1e-5)
    # The values differ by what does not depend on the policy.
    constants = 0.5 / beta * residuals.square().detach() - found.losses
    expected = [a * a / (2 * beta) + a * math.log(o) for a, o in zip(advantages, old, strict=True)]
    assert constants.tolist() == pytest.approx(expected, abs=1e-5)


def test_cispo_equals_a_literal():
    # Ratios 2, 0.5, 1.1: weights 1.28, 0.8, 1.1; every token keeps its gradient.
    found, gradient = losses_and_gradient(
        cispo, policy=[0.4, 0.1, 0.22], old=[0.2, 0.2, 0.2], advantages=[1.0, -1.0, 2.0], clip_low=0.2, clip_high=0.28
    )
    assert gradient == pytest.approx([-1.28, 0.8, -2.2])
    assert found.losses.tolist() == pytest.approx([-1.28 * math.log(0.4), 0.8 * math.log(0.1), -2.2 * math.log(0.22)])
    assert found.diagnostics["actor/pg_clipfrac"].tolist() == [1.0, 1.0, 0.0]


def test_dppo_tv_equals_a_literal():
    # Probabilities rise by 0.3 (stopped) and 0.1, then fall by 0.3 at advantages of -1 (stopped) and 1.
    found, gradient = losses_and_gradient(
        dppo_tv,
        policy=[0.5, 0.3, 0.2, 0.2],
        old=[0.2, 0.2, 0.5, 0.5],
        advantages=[1.0, 1.0, -1.0, 1.0],
        clip_low=0.2,
        clip_high=0.2,
    )
    assert gradient == pytest.approx([0.0, -1.5, 0.0, -0.4])
    assert found.diagnostics["actor/pg_clipfrac"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_dppo_cuts_large_weights():
    # The ratio is 20, but the probability hardly changes.
    found, gradient = losses_and_gradient(dppo_tv, policy=[0.02], old=[0.001], advantages=[1.0], ratio_cap=3.0)
    assert gradient == pytest.approx([-3.0])
    assert found.diagnostics["actor/pg_clipfrac_lower"].tolist() == [1.0]


def test_dppo_kl_equals_a_literal():
    # KL of (0.5, 0.5) to (0.8, 0.2): 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231; further rises are stopped.
    kl = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    for bound, expected in ((kl - 1e-6, [0.0, 1.6]), (kl + 1e-6, [-1.6, 1.6])):
        found, gradient = losses_and_gradient(
            dppo_kl, policy=[0.8, 0.8], old=[0.5, 0.5], advantages=[1.0, -1.0], clip_low=bound, clip_high=bound
        )
        assert gradient == pytest.approx(expected)
        assert found.diagnostics["actor/pg_clipfrac"].tolist() == [float(expected[0] == 0.0), 0.0]


def test_certain_tokens_stay_finite():
    for loss in (dppo_tv, dppo_kl):
        found, gradient = losses_and_gradient(loss, policy=[1.0, 1e-30], old=[1e-30, 1.0], advantages=[1.0, -1.0])
        assert found.losses.isfinite().all()
        assert gradient == [0.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (cispo, {"clip_low": 1.5}),
        (dppo_tv, {"clip_low": -1.0}),
        (dppo_kl, {"clip_high": -1.0}),
        (dppo_tv, {"ratio_cap": 0.5}),
        (dppo_tv, {"clip_high": 1.5}),
    ],
)
def test_impossible_options_are_refused(loss, options):
    with pytest.raises(SettingsError, match=r"of \w+ must be a number of at least"):
        losses_and_gradient(loss, policy=[0.5], old=[0.5], advantages=[1.0], **options)
