import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import SettingsError, ShapeError
from rl_distill.objectives import AGGREGATIONS, PolicyTokens, aggregate, compute_policy_loss
from rl_distill.objectives.policy_loss import ppo_clip


def tokens_of(ratios, advantages, *, loss_mask=None, policy_logprobs=None):
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return PolicyTokens(
        policy_logprobs=old + torch.tensor(ratios, dtype=torch.float64).log()
        if policy_logprobs is None
        else policy_logprobs,
        old_logprobs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(len(ratios), dtype=torch.bool) if loss_mask is None else torch.tensor(loss_mask),
        offsets=torch.tensor([0, len(ratios)]),
    )


def test_ppo_clip_equals_literals():
    # Ratio and advantage -> loss, by hand, with clip 0.2 / 0.28 and dual clip 3:
    cases = [
        (1.1, 2.0, -2.2),  # inside the clip range: -A r
        (1.5, 2.0, -2.56),  # clipped at 1.28
        (0.5, 2.0, -1.0),  # not clipped below: -A r
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),  # not clipped above: -A r
        (5.0, -2.0, 6.0),  # dual clip: 3 |A|
    ]
    ratios, advantages, expected = zip(*cases, strict=True)
    found = ppo_clip(tokens_of(ratios, advantages), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.diagnostics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 1, 0, 0]
    assert found.diagnostics["actor/pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 0, 1]
    assert found.diagnostics["actor/ppo_kl"].tolist() == pytest.approx([-math.log(r) for r in ratios], rel=1e-12)


def test_an_infinite_dual_clip_clips_nothing():
    found = ppo_clip(tokens_of([5.0, 5.0, 1.0], [-2.0, 0.0, 1.0]), dual_clip=math.inf)
    assert found.losses.tolist() == pytest.approx([10.0, 0.0, -1.0], rel=1e-12)


def test_gradient_is_the_policy_gradient_on_policy_and_zero_where_clipped():
    tokens = tokens_of([1.0, 1.5, 0.5, 5.0], [2.0, 2.0, -2.0, -2.0])
    policy = tokens.policy_logprobs.clone().requires_grad_()
    tokens = tokens_of([1.0] * 4, [2.0, 2.0, -2.0, -2.0], policy_logprobs=policy)
    ppo_clip(tokens).losses.sum().backward()
    assert policy.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, 0.0])


def test_gradients_equal_numeric_ones():
    policy = torch.tensor([-1.05, -0.6, -1.9, -0.9, 0.7], dtype=torch.float64, requires_grad=True)

    def losses(logprobs):
        return ppo_clip(tokens_of([1.0] * 5, [1.0, 2.0, 3.0, -1.0, -2.0], policy_logprobs=logprobs)).losses

    assert torch.autograd.gradcheck(losses, policy)


def test_far_ratio_does_not_overflow():
    policy = torch.tensor([500.0, -500.0, 500.0], requires_grad=True)
    found = ppo_clip(
        PolicyTokens(
            policy_logprobs=policy,
            old_logprobs=torch.zeros(3),
            advantages=torch.tensor([1.0, 1.0, -1.0]),
            loss_mask=torch.ones(3, dtype=torch.bool),
            offsets=torch.tensor([0, 3]),
        )
    )
    found.losses.sum().backward()
    assert found.losses.isfinite().all()
    assert policy.grad.tolist() == [0.0, 0.0, 0.0]


def test_masked_tokens_read_zero_and_pass_no_gradient():
    policy = torch.tensor([-1.0, math.nan, math.inf, -1.0], requires_grad=True)
    nan = torch.tensor([-1.0, math.nan, -math.inf, -1.0])
    mask = torch.tensor([True, False, False, True])
    tokens = PolicyTokens(
        policy_logprobs=policy, old_logprobs=nan, advantages=nan, loss_mask=mask, offsets=torch.tensor([0, 4])
    )
    assert tokens.advantages.tolist() == tokens.old_logprobs.tolist() == [-1.0, 0.0, 0.0, -1.0]
    ppo_clip(tokens).losses.sum().backward()
    assert policy.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_old_logprobs_and_advantages_pass_no_gradient():
    policy = torch.tensor([-1.0], requires_grad=True)
    tokens = PolicyTokens(
        policy_logprobs=policy,
        old_logprobs=policy,
        advantages=policy * -2.0,
        loss_mask=torch.tensor([True]),
        offsets=torch.tensor([0, 1]),
    )
    ppo_clip(tokens).losses.sum().backward()
    assert policy.grad.tolist() == [-2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low of ppo_clip must be a number of at least 0 and below 1; found -0.1"),
        ({"clip_low": 1.0}, "clip_low of .* found 1.0"),
        ({"clip_high": -0.1}, r"clip_high of ppo_clip must be a number of at least 0; found -0.1"),
        ({"dual_clip": 1.0}, r"dual_clip of ppo_clip must be a number above 1; found 1.0"),
        ({"dual_clip": math.nan}, "dual_clip of .*; found nan"),
    ],
)
def test_impossible_clip_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        ppo_clip(tokens_of([1.0], [1.0]), **options)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"advantages must have shape \[T\] like policy_logprobs, \[2\]"):
        tokens_of([1.0, 1.0], [1.0])
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        tokens_of([1.0], [1.0], loss_mask=[1.0])


@settings(deadline=None)
@given(st.floats(0.01, 50), st.floats(-5, 5))
def test_loss_is_never_below_the_unclipped_one_but_for_dual_clip(ratio, advantage):
    found = float(ppo_clip(tokens_of([ratio], [advantage])).losses)
    assert found >= min(-advantage * ratio, 3 * abs(advantage)) - 1e-9
    assert found <= 3 * abs(advantage) + 1e-9


def padded(*, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (-torch.rand(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    return logprobs.requires_grad_(requires_grad), old, mask, advantages


def by_hand(name, losses, mask):
    """Return the aggregated loss with the formulas of TRL and verl."""
    rows = (losses * mask).sum(-1)
    return {
        "token-mean": rows.sum() / mask.sum(),
        "token-sum": rows.sum(),
        "seq-mean-token-sum": rows.mean(),
        "seq-mean-token-mean": (rows / mask.sum(-1)).mean(),
        "seq-mean-token-sum-norm": (rows / 4).mean(),
    }[name]


@pytest.mark.parametrize("name", AGGREGATIONS.names())
def test_padded_rows_give_the_loss_and_gradient_of_the_formula(name):
    logprobs, old, mask, advantages = padded()
    horizon = 4 if name == "seq-mean-token-sum-norm" else None
    tokens = PolicyTokens.from_padded(logprobs, mask, advantages=advantages, old_logprobs=old)
    loss, metrics = compute_policy_loss(tokens, "ppo_clip", aggregation=name, horizon=horizon, clip_low=0.1)
    (grad,) = torch.autograd.grad(loss, logprobs)
    ratio, of_token = (logprobs - old).exp(), advantages[:, None]
    expected = by_hand(name, torch.maximum(-of_token * ratio, -of_token * ratio.clamp(0.9, 1.2)), mask)
    (expected_grad,) = torch.autograd.grad(expected, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(grad, expected_grad, rtol=1e-6)
    clipped = ((ratio > 1.2) & (of_token > 0)) | ((ratio < 0.9) & (of_token < 0))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(((clipped * mask).sum() / mask.sum()).item())
    values = aggregate(logprobs, mask, aggregation=name, horizon=horizon)
    assert values.item() == pytest.approx(by_hand(name, logprobs, mask).item(), rel=1e-6)


def test_what_is_padded_counts_for_nothing_and_old_logprobs_may_be_left_out():
    logprobs, _, mask, advantages = padded(requires_grad=False)
    broken = torch.where(mask > 0, logprobs, torch.nan).requires_grad_()
    tokens = PolicyTokens.from_padded(broken, mask > 0, advantages=advantages)
    loss, metrics = compute_policy_loss(tokens)
    loss.backward()
    assert torch.isfinite(loss)
    assert (broken.grad[mask == 0] == 0).all()
    assert metrics["actor/ppo_kl"] == 0
    by_token = PolicyTokens.from_padded(broken, mask, advantages=advantages[:, None].expand(3, 4))
    assert compute_policy_loss(by_token)[0] == loss


def test_tokens_that_a_loss_treats_apart_are_selected_by_itself():
    logprobs, old, mask, advantages = padded()
    tokens = PolicyTokens.from_padded(logprobs, mask, advantages=advantages, old_logprobs=old)
    loss, _ = compute_policy_loss(tokens, "clip_cov", share=1.0, low=-9.0, high=9.0)
    loss.backward()
    assert (logprobs.grad == 0).all()  # every token was selected and has no gradient


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"old_logprobs": torch.zeros(3, 5)},
            r"old_logprobs must have shape \[B, T\] like policy_logprobs, \[\d, \d\]; found \[3, 5\]",
        ),
        ({"advantages": torch.zeros(2)}, r"advantages must have shape"),
        ({"loss_mask": torch.ones(3, 4)}, "loss_mask must have dtype torch.bool; found torch.float32"),
        ({"policy_logprobs": torch.zeros(12), "loss_mask": torch.ones(12, dtype=torch.bool)}, r"\[B, T\]"),
    ],
)
def test_what_is_not_padded_alike_is_refused(change, said):
    logprobs, old, mask, advantages = padded()
    given = {"policy_logprobs": logprobs, "loss_mask": mask, "advantages": advantages, "old_logprobs": old} | change
    with pytest.raises(ShapeError, match=said):
        PolicyTokens.from_padded(**given)
    with pytest.raises(SettingsError, match=r"unknown aggregation.*token-mean"):
        aggregate(old, mask, aggregation="mean-token")
