"""The conformance kit passes what is right, and catches each way of being wrong by the rule that it breaks."""

import pytest
import torch

from rl_distill.objectives import TokenLosses, ppo_clip
from rl_distill.testing import ConformanceError, check_objective, check_policy_loss, example_batch


def plain(tokens):
    return TokenLosses(losses=-tokens.advantages * tokens.log_ratio().exp())


def cispo_like(tokens):
    return TokenLosses(losses=-tokens.advantages * tokens.log_ratio().exp().detach() * tokens.policy_logprobs)


def ignores_advantages(tokens):
    return TokenLosses(losses=-tokens.log_ratio().exp())


def divides_by_the_micro_batch(tokens):
    return TokenLosses(losses=plain(tokens).losses / tokens.loss_mask.sum().clamp(min=1))


def whitens_over_the_micro_batch(tokens):
    losses = plain(tokens).losses
    return TokenLosses(losses=losses - losses.mean())


def detached(tokens):
    return TokenLosses(losses=plain(tokens).losses.detach())


def masks_too_late(policy_logprobs, _entropy, micro):
    columns = micro.columns
    losses = -columns["advantages"] * (policy_logprobs - columns["old_logprobs"]).exp()
    return (losses * columns["loss_mask"] * columns["loss_weights"]).sum(), {}


def forgets_the_mask(policy_logprobs, _entropy, micro):
    columns = micro.columns
    safe = torch.where(policy_logprobs.isfinite() & (policy_logprobs < 1e6), policy_logprobs, 0.0)
    advantages = torch.where(columns["loss_mask"], columns["advantages"], 1.0)
    nonzero = advantages * (columns["advantages"] != 0)
    return -(safe * (nonzero if not columns["advantages"].any() else advantages)).sum(), {}


def sums_a_mean(policy_logprobs, _entropy, micro):
    mask = micro.columns["loss_mask"]
    logprobs, advantages = (torch.where(mask, x, 0.0) for x in (policy_logprobs, micro.columns["advantages"]))
    return -(advantages * logprobs).sum() / mask.sum().clamp(min=1), {}


def metrics_as_means(policy_logprobs, _entropy, micro):
    mask = micro.columns["loss_mask"]
    logprobs, advantages = (torch.where(mask, x, 0.0) for x in (policy_logprobs, micro.columns["advantages"]))
    return -(advantages * logprobs).sum(), {"actor/x": (logprobs.detach().mean(), torch.tensor(1.0))}


def keeps_the_graph(policy_logprobs, _entropy, micro):
    mask = micro.columns["loss_mask"]
    logprobs, advantages = (torch.where(mask, x, 0.0) for x in (policy_logprobs, micro.columns["advantages"]))
    loss = -(advantages * logprobs).sum()
    return loss, {"actor/pg_loss": (loss, mask.sum())}


@pytest.mark.parametrize("seed", range(5))
def test_good_losses_pass(seed):
    check_policy_loss(ppo_clip, seed=seed)
    check_policy_loss(plain, seed=seed)
    check_policy_loss(cispo_like, has_stop_gradient=True, seed=seed)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (cispo_like, "not the derivative"),
        (ignores_advantages, "zero advantages must give zero gradients"),
        (divides_by_the_micro_batch, "micro-batches must add up"),
        (whitens_over_the_micro_batch, "micro-batches must add up"),
        (detached, "has no gradient"),
    ],
)
def test_broken_policy_losses_are_caught(broken, rule):
    with pytest.raises(ConformanceError, match=rule):
        check_policy_loss(broken)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (masks_too_late, "masked tokens must not count; with nan"),
        (forgets_the_mask, "masked tokens must"),
        (sums_a_mean, "micro-batches must add up.*loss differs"),
        (keeps_the_graph, "metric sums must be detached; actor/pg_loss"),
        (metrics_as_means, "micro-batches must add up.*actor/x differs"),
    ],
)
def test_broken_objectives_are_caught(broken, rule):
    with pytest.raises(ConformanceError, match=rule):
        check_objective(broken)


def test_example_has_what_the_checks_need():
    example = example_batch()
    columns = example.micro.columns
    mask = columns["loss_mask"]
    assert mask.any()
    assert not mask[example.micro.offsets[:-1]].any()
    assert (columns["advantages"] > 0).any()
    assert (columns["advantages"] < 0).any()
    assert float(columns["loss_weights"].sum()) == pytest.approx(1.0)
