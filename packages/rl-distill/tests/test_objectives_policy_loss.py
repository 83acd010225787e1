import math
from dataclasses import replace

import pytest
import torch

from rl_core.errors import SettingsError, ShapeError
from rl_distill.objectives import AGGREGATIONS, POLICY_LOSSES, PolicyTokens, aggregate, compute_policy_loss
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


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_every_loss_tells_how_far_the_policy_moved_without_a_gradient(name):
    policy = torch.tensor([-0.5, -2.0, -1.25, -3.0], dtype=torch.float64, requires_grad=True)
    selection = torch.tensor([True, False, True, False])
    tokens = replace(tokens_of([1.0] * 4, [1.0, -1.0, 0.5, -2.0]), policy_logprobs=policy, selection=selection)
    diagnostics = POLICY_LOSSES.get(name)(tokens).diagnostics
    assert diagnostics["actor/ppo_kl"].tolist() == [-0.5, 1.0, 0.25, 2.0]
    assert [metric for metric, values in diagnostics.items() if values.requires_grad] == []


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


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"advantages must have shape \[T\] like policy_logprobs, \[2\]"):
        tokens_of([1.0, 1.0], [1.0])
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        tokens_of([1.0], [1.0], loss_mask=[1.0])
    whole = tokens_of([1.0, 1.0], [1.0, 1.0])
    for change, said in (
        ({"offsets": torch.tensor([0, 1])}, "offsets must run from 0 to T = 2"),
        ({"selection": torch.ones(1, dtype=torch.bool)}, r"selection must have shape \[T\]"),
        ({"old_logprobs": torch.zeros(2, 1)}, "old_logprobs must have shape"),
    ):
        with pytest.raises(ShapeError, match=said):
            replace(whole, **change)
    with pytest.raises(ShapeError, match=r"values must have shape \[T\] like loss_mask, \[2\]; found \[1\]"):
        aggregate(torch.zeros(1), torch.ones(2, dtype=torch.bool), offsets=torch.tensor([0, 2]))


def test_a_selection_is_of_trained_tokens_and_may_be_of_numbers():
    tokens = replace(tokens_of([1.0] * 3, [1.0] * 3, loss_mask=[True, False, True]), selection=torch.tensor([0, 1, 1]))
    assert tokens.selection.tolist() == [False, False, True]
    assert tokens.num_tokens == 3


def test_packed_values_are_aggregated_over_their_rows():
    values, mask = torch.tensor([1.0, math.nan, 3.0, 5.0]), torch.tensor([True, False, True, True])
    found = aggregate(values, mask, aggregation="seq-mean-token-mean", offsets=torch.tensor([0, 3, 4]))
    assert found.item() == pytest.approx((2.0 + 5.0) / 2)
    assert aggregate(values, mask, offsets=torch.tensor([0, 3, 4])).item() == pytest.approx(3.0)


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
    assert not tokens.old_logprobs.requires_grad


def test_metrics_of_one_token_are_its_own():
    _, metrics = compute_policy_loss(tokens_of([4.0, 1.0], [1.0, 1.0], loss_mask=[True, False]))
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(4.0))
    assert metrics["actor/pg_clipfrac"].item() == 1.0


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


def test_nothing_that_trains_has_a_loss_and_metrics_of_zero():
    logprobs, old, mask, advantages = padded()
    tokens = PolicyTokens.from_padded(logprobs, 0 * mask, advantages=advantages, old_logprobs=old)
    loss, metrics = compute_policy_loss(tokens)
    assert float(loss) == 0.0
    assert {float(value) for value in metrics.values()} == {0.0}
    assert len(metrics) == 3
