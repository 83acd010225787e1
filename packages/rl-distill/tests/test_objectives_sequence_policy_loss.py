import math

import pytest
import torch

from rl_core.errors import SettingsError
from rl_distill.objectives import PolicyTokens
from rl_distill.objectives.policy_losses import geo_mean, gspo

LOG = math.log


def tokens_of(log_ratios, advantages, *, lengths=None, loss_mask=None):
    """Return tokens with old logprobs of -3, and their policy_logprobs, which require a gradient."""
    policy = (torch.tensor(log_ratios, dtype=torch.float64) - 3.0).requires_grad_()
    offsets = torch.tensor([0, *(lengths or [len(log_ratios)])]).cumsum(0)
    tokens = PolicyTokens(
        policy_logprobs=policy,
        old_logprobs=torch.full_like(policy, -3.0),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(policy), dtype=torch.bool) if loss_mask is None else torch.tensor(loss_mask),
        offsets=offsets,
    )
    return tokens, policy


def test_gspo_equals_a_literal():
    # First response: ratios 2 and 8, with a masked token between them; geometric mean 4. Second response: ratio 1/2.
    tokens, policy = tokens_of(
        [LOG(2), 50.0, LOG(8), LOG(0.5)], [-1.0, 9.0, -3.0, 2.0], lengths=[3, 1], loss_mask=[True, False, True, True]
    )
    found = gspo(tokens, clip_low=0.2, clip_high=0.28)
    assert found.losses[tokens.loss_mask].tolist() == pytest.approx([4.0, 12.0, -1.0])
    found.losses[tokens.loss_mask].sum().backward()
    assert policy.grad.tolist() == pytest.approx([4.0, 0.0, 12.0, -1.0])


def test_gspo_clips_the_whole_response():
    tokens, policy = tokens_of([LOG(2), 0.0], [1.0, 1.0])  # geometric mean 1.414
    found = gspo(tokens, clip_low=0.2, clip_high=0.28)
    assert found.losses.tolist() == pytest.approx([-1.28, -1.28])
    assert found.diagnostics["actor/pg_clipfrac"].tolist() == [1.0, 1.0]
    found.losses.sum().backward()
    assert policy.grad.tolist() == [0.0, 0.0]


def test_gspo_far_ratio_does_not_overflow():
    tokens, policy = tokens_of([2000.0], [-1.0])
    gspo(tokens).losses.sum().backward()
    assert policy.grad.tolist() == [0.0]


def test_geo_mean_equals_a_literal():
    # Log ratios 0.2 and 1.0 at positive advantages: the second is clipped to 0.4; mean 0.3. Advantage (1 + 3) / 2.
    tokens, policy = tokens_of([0.2, 1.0], [1.0, 3.0])
    found = geo_mean(tokens, clip_low=0.4, clip_high=0.4)
    assert found.losses.tolist() == pytest.approx([-2.0 * math.exp(0.3)] * 2)
    assert found.diagnostics["actor/pg_clipfrac"].tolist() == [0.0, 1.0]
    found.losses.mean().backward()
    assert policy.grad.tolist() == pytest.approx([-math.exp(0.3), 0.0])


def test_geo_mean_at_negative_advantages_holds_from_below():
    tokens, _ = tokens_of([-1.0, 1.0], [-2.0, -2.0])
    found = geo_mean(tokens, clip_low=0.4, clip_high=0.4)
    assert found.losses.tolist() == pytest.approx([2.0 * math.exp(0.3)] * 2)
    assert found.diagnostics["actor/pg_clipfrac_lower"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("loss", "clipped"),
    [
        (gspo, {"actor/pg_clipfrac": [1.0, 1.0, 0.0, 0.0]}),
        (geo_mean, {"actor/pg_clipfrac": [1.0, 0.0, 0.0, 0.0], "actor/pg_clipfrac_lower": [0.0, 1.0, 0.0, 0.0]}),
    ],
)
def test_metrics_have_no_gradient_and_count_no_token_with_advantage_zero(loss, clipped):
    tokens, _ = tokens_of([0.5, -0.5, 0.0, 1.0], [1.0, -1.0, 2.0, 0.0], lengths=[1, 1, 1, 1])
    metrics = loss(tokens).diagnostics
    assert {name: values.tolist() for name, values in metrics.items()} == {
        **clipped,
        "actor/ppo_kl": [-0.5, 0.5, 0.0, -1.0],
    }
    assert [name for name, values in metrics.items() if values.requires_grad] == []


def test_a_response_without_trained_tokens_gives_zeros():
    tokens, _ = tokens_of([1.0, 2.0], [1.0, 1.0], lengths=[1, 1], loss_mask=[True, False])
    for loss in (gspo, geo_mean):
        assert loss(tokens).losses.isfinite().all()
        assert loss(tokens).losses[1].item() == 0.0


def test_impossible_bounds_are_refused():
    tokens, _ = tokens_of([0.0], [1.0])
    with pytest.raises(SettingsError, match=r"clip_low of gspo must be a number of at least 0 and below 1"):
        gspo(tokens, clip_low=2.0)
    with pytest.raises(SettingsError, match=r"clip_high of geo_mean must be a number of at least 0"):
        geo_mean(tokens, clip_high=-1.0)
