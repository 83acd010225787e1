import math

import pytest
import torch

from rl_distill.objectives import POLICY_LOSSES, PolicyTokens
from rl_distill.objectives.policy_losses import dppo_kl, dppo_tv


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


def of_token(
    name, logp, old, advantage, selected, *, low=0.2, high=0.2, dual=3.0, cap=20.0, tau=(1.0, 1.05), **options
):
    """Return loss, its gradient, clipfrac and clipfrac_lower of one token; None for metrics that the loss lacks."""
    log_ratio = logp - old
    ratio, coefficient = math.exp(log_ratio), options.get("coefficient", 1.0)
    plain, held = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    if name == "ppo_clip":
        ceiling = -dual * advantage if advantage < 0 else math.inf
        is_capped, is_clipped = max(plain, held) > ceiling, held > plain
        return min(max(plain, held), ceiling), 0.0 if is_clipped or is_capped else plain, is_clipped, is_capped
    if name == "clip_cov":
        loss = (0.0, 0.0) if selected else (max(plain, held), 0.0 if held > plain else plain)
        return *loss, held > plain, None
    if name == "kl_cov":
        pull = coefficient * selected
        return plain + pull * abs(log_ratio), plain + pull * ((log_ratio > 0) - (log_ratio < 0)), None, None
    if name == "sapo":
        steepness = tau[advantage <= 0]
        gate = 1 / (1 + math.exp(-steepness * (ratio - 1)))
        return -advantage * 4 / steepness * gate, -advantage * 4 * gate * (1 - gate) * ratio, None, None
    if name == "dro":
        beta = options.get("beta", 0.05)
        return 0.5 * beta * log_ratio**2 - advantage * logp, beta * log_ratio - advantage, None, None
    if name == "gpg":
        return -advantage * logp, -advantage, None, None
    if name == "cispo":
        weight = min(max(ratio, 1 - low), 1 + high)
        return -advantage * weight * logp, -advantage * weight, weight != ratio, None
    p, q = math.exp(logp), math.exp(old)
    if name == "dppo_tv":
        is_near = p - q <= high if advantage > 0 else p - q >= -low
    else:
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        is_near = kl <= (high if advantage > 0 else low) or (p <= q if advantage > 0 else p >= q)
    weight = min(ratio, cap) if is_near else 0.0
    return -advantage * weight * logp, -advantage * weight, not is_near, is_near and ratio > cap


OLD = (0.001, 0.2, 0.25, 0.5, 0.6, 0.9)
POLICY = (0.002, 0.1, 0.21, 0.25, 0.3, 0.5, 0.58, 0.75, 0.95)
GRID = [(p, q, a, s) for p in POLICY for q in OLD for a in (2.0, -1.0, 0.0) for s in (False, True)]
"""Probabilities under the policy and the old policy, advantage, and whether the token is selected."""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ppo_clip", {}, {}),
        ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0}, {"low": 0.1, "high": 0.3, "dual": 2.0}),
        ("ppo_clip", {"clip_low": 0, "clip_high": 0, "dual_clip": math.inf}, {"low": 0, "high": 0, "dual": math.inf}),
        ("clip_cov", {}, {}),
        ("clip_cov", {"clip_low": 0.1, "clip_high": 0.3}, {"low": 0.1, "high": 0.3}),
        ("kl_cov", {}, {}),
        ("kl_cov", {"kl_to_old_coefficient": 0.5}, {"coefficient": 0.5}),
        ("sapo", {}, {}),
        ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}, {"tau": (2.0, 0.5)}),
        ("gpg", {}, {}),
        ("dro", {}, {}),
        ("dro", {"beta": 0.3}, {"beta": 0.3}),
        ("cispo", {}, {"high": 0.28}),
        ("cispo", {"clip_low": 1.0, "clip_high": 0.0}, {"low": 1.0, "high": 0.0}),
        ("dppo_tv", {}, {}),
        ("dppo_tv", {"clip_low": 0.25, "clip_high": 0, "ratio_cap": 1.5}, {"low": 0.25, "high": 0, "cap": 1.5}),
        ("dppo_tv", {"clip_low": 0, "clip_high": 0.25, "ratio_cap": 2.0}, {"low": 0, "high": 0.25, "cap": 2.0}),
        ("dppo_kl", {}, {"low": 0.05, "high": 0.05}),
        ("dppo_kl", {"clip_low": 0, "clip_high": 0.01, "ratio_cap": 1.5}, {"low": 0, "high": 0.01, "cap": 1.5}),
    ],
)
def test_losses_gradients_and_metrics_are_those_of_the_papers(name, options, said):
    policy, old, advantages, selected = zip(*GRID, strict=True)
    logprobs = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    tokens = PolicyTokens(
        policy_logprobs=logprobs,
        old_logprobs=torch.tensor(old, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(GRID), dtype=torch.bool),
        offsets=torch.arange(len(GRID) + 1),
        selection=torch.tensor(selected),
    )
    found = POLICY_LOSSES.get(name)(tokens, **options)
    (gradient,) = torch.autograd.grad(found.losses.sum(), logprobs)
    pairs = list(zip(logprobs.tolist(), tokens.old_logprobs.tolist(), advantages, selected, strict=True))
    expected = [of_token(name, *one, **said) for one in pairs]
    losses, gradients, clipped, capped = zip(*expected, strict=True)
    assert found.losses.tolist() == pytest.approx(losses, rel=1e-6, abs=1e-9)
    ties = 0.5 if name == "ppo_clip" and math.inf not in options.values() else 1.0
    for place, (one, other) in enumerate(zip(gradient.tolist(), gradients, strict=True)):
        is_tie = ties < 1 and policy[place] / old[place] == pytest.approx(options.get("dual_clip", 3.0))
        is_tie |= policy[place] == old[place] and 0 in options.values()
        assert is_tie or one == pytest.approx(other, rel=1e-6, abs=1e-9), GRID[place]
    metrics = {"actor/ppo_kl": [q - p for p, q, _, _ in pairs]}
    metrics |= {"actor/pg_clipfrac": clipped} if None not in clipped else {}
    metrics |= {"actor/pg_clipfrac_lower": capped} if None not in capped else {}
    metrics |= {"actor/selected_fraction": selected} if name in ("clip_cov", "kl_cov") else {}
    assert found.diagnostics.keys() == metrics.keys()
    for metric, values in metrics.items():
        assert not found.diagnostics[metric].requires_grad
        assert found.diagnostics[metric].tolist() == pytest.approx([float(one) for one in values], abs=1e-12), metric


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


def test_certain_tokens_stay_finite():
    for loss in (dppo_tv, dppo_kl):
        found, gradient = losses_and_gradient(loss, policy=[1.0, 1e-30], old=[1e-30, 1.0], advantages=[1.0, -1.0])
        assert found.losses.isfinite().all()
        assert gradient == [0.0, 0.0]
