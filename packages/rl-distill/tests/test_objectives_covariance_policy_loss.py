import math
from dataclasses import replace

import pytest
import torch

from rl_core.errors import DataError, SettingsError
from rl_distill.objectives import PolicyTokens
from rl_distill.objectives.covariance_policy_loss import clip_cov, covariances, kl_cov, select_band, select_top
from rl_distill.objectives.policy_loss import ppo_clip

# Means over the trained tokens: logprob -2, advantage 1. Products of the deviations: (1)(2), (-1)(0), (0)(-2).
LOGPROBS = torch.tensor([-1.0, math.nan, -3.0, -2.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([3.0, math.nan, 1.0, -1.0], dtype=torch.float64)
MASK = torch.tensor([True, False, True, True])


def tokens_of(selection, *, ratios=(1.0, 1.0, 1.0, 1.0)):
    policy = (LOGPROBS + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return policy, PolicyTokens(
        policy_logprobs=policy,
        old_logprobs=LOGPROBS,
        advantages=ADVANTAGES,
        loss_mask=MASK,
        offsets=torch.tensor([0, 4]),
        selection=None if selection is None else torch.tensor(selection),
    )


def test_covariances_equal_a_literal():
    assert covariances(LOGPROBS, ADVANTAGES, MASK).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert covariances(LOGPROBS, ADVANTAGES, MASK).sum() / 2 == pytest.approx(
        torch.cov(torch.stack([LOGPROBS[MASK], ADVANTAGES[MASK]]))[0, 1]
    )


@pytest.mark.parametrize(("share", "expected"), [(1e-4, [1, 0, 0, 0]), (0.67, [1, 0, 1, 0]), (1.0, [1, 0, 1, 1])])
def test_top_share_selects_the_earlier_of_equal_tokens(share, expected):
    # Two products are 0: the earlier token is selected first. The masked token is never selected.
    assert select_top(LOGPROBS, ADVANTAGES, MASK, share=share).tolist() == [bool(is_in) for is_in in expected]


def test_top_of_many_equal_tokens_are_the_earlier_ones():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = (torch.randint(-1, 2, (300,), generator=generator).double() for _ in range(2))
    mask = torch.rand(300, generator=generator) > 0.2
    covariance = covariances(logprobs, advantages, mask).tolist()
    order = sorted((token for token in range(300) if mask[token]), key=lambda token: -covariance[token])
    for share in (0.1, 0.5):
        found = select_top(logprobs, advantages, mask, share=share).nonzero().flatten()
        assert found.tolist() == sorted(order[: int(share * len(order))])


def test_band_is_a_random_choice_within_it():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = (torch.randn(2000, generator=generator) for _ in range(2))
    mask = torch.rand(2000, generator=generator) > 0.2
    inside = (covariances(logprobs, advantages, mask) > 1.0) & (covariances(logprobs, advantages, mask) < 5.0)
    found = select_band(logprobs, advantages, mask, share=0.01)
    assert int(found.sum()) == int(0.01 * int(mask.sum()))
    assert bool((inside | ~found).all())
    assert torch.equal(found, select_band(logprobs, advantages, mask, share=0.01))
    assert not torch.equal(found, select_band(logprobs, advantages, mask, share=0.01, seed=1))
    everything = select_band(logprobs, advantages, mask, share=1.0)
    assert torch.equal(everything, inside & mask)


def test_tokens_on_a_bound_are_outside_the_band():
    """The covariances of these tokens are 2, 0 and 0."""
    band = lambda low, high: select_band(LOGPROBS, ADVANTAGES, MASK, share=1.0, low=low, high=high).tolist()
    assert band(-1.0, 3.0) == [True, False, True, True]
    assert band(-1.0, 2.0) == [False, False, True, True]
    assert band(0.0, 3.0) == [True, False, False, False]


def test_nothing_is_selected_without_candidates():
    mask = torch.zeros(4, dtype=torch.bool)
    assert not select_top(LOGPROBS, ADVANTAGES, mask).any()
    assert not select_band(LOGPROBS, ADVANTAGES, mask).any()
    assert not select_band(LOGPROBS, ADVANTAGES, MASK, low=100.0, high=200.0).any()


def test_clip_cov_takes_the_gradient_of_selected_tokens_away():
    policy, tokens = tokens_of([True, True, False, False])
    found = clip_cov(tokens)
    assert found.losses.tolist() == [0.0, 0.0, -1.0, 1.0]
    found.losses.sum().backward()
    assert policy.grad.tolist() == [0.0, 0.0, -1.0, 1.0]
    assert found.diagnostics["actor/selected_fraction"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_clip_cov_clips_the_others():
    _, tokens = tokens_of([False] * 4, ratios=(2.0, 1.0, 2.0, 1.0))
    _, without = tokens_of([False] * 4, ratios=(2.0, 1.0, 2.0, 1.0))
    assert clip_cov(tokens).losses.tolist() == ppo_clip(without, dual_clip=math.inf).losses.tolist()


def test_kl_cov_pulls_selected_tokens_back():
    policy, tokens = tokens_of([True, False, False, False], ratios=(2.0, 1.0, 2.0, 1.0))
    found = kl_cov(tokens, kl_to_old_coefficient=0.5)
    assert found.losses.tolist() == pytest.approx([-6.0 + 0.5 * math.log(2), 0.0, -2.0, 1.0])
    found.losses.sum().backward()
    assert policy.grad.tolist() == pytest.approx([-6.0 + 0.5, 0.0, -2.0, 1.0])


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_without_a_selection_is_refused(loss):
    _, tokens = tokens_of(None)
    with pytest.raises(DataError, match="with_token_selection"):
        loss(tokens)
    assert loss(replace(tokens, selection=MASK)).losses.isfinite().all()


def test_impossible_options_are_refused():
    with pytest.raises(SettingsError, match=r"share of select_top must be a number above 0 and at most 1; found 0.0"):
        select_top(LOGPROBS, ADVANTAGES, MASK, share=0.0)
    with pytest.raises(SettingsError, match=r"low of select_band must be below high; found low = 2.0, high = 1.0"):
        select_band(LOGPROBS, ADVANTAGES, MASK, low=2.0, high=1.0)
    with pytest.raises(SettingsError, match="kl_to_old_coefficient"):
        kl_cov(tokens_of([False] * 4)[1], kl_to_old_coefficient=-1.0)
