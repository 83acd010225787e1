"""The conformance kit passes what is right, and catches each way of being wrong by the rule that it breaks."""

import math
from functools import partial

import pytest
import torch

from rl_distill.objectives import (
    ADVANTAGES,
    KL,
    POLICY_LOSSES,
    SESSION_RULE,
    PolicyObjectiveOptions,
    RewardedRows,
    TokenLosses,
    policy_objective,
    ppo_clip,
    value_objective,
)
from rl_distill.testing import (
    ConformanceError,
    check_advantage,
    check_objective,
    check_policy_loss,
    check_value_loss,
    example_batch,
    example_rows,
)

STOP_GRADIENT = ("gspo", "gpg", "cispo", "dppo_tv", "dppo_kl")
"""Their gradient is that of the logprob, times a detached weight. (Of gpg it is the derivative all the same.)"""

BATCHWIDE = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""They whiten over the batch."""


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_every_built_in_policy_loss_passes(name, seed):
    check_policy_loss(
        POLICY_LOSSES.get(name), has_stop_gradient=name in STOP_GRADIENT, is_regularized=name == "kl_cov", seed=seed
    )


@pytest.mark.parametrize("name", KL.names())
def test_every_built_in_kl_passes(name):
    objective = policy_objective(PolicyObjectiveOptions(kl_coefficient=0.2, kl_estimator=name))
    check_objective(objective, has_stop_gradient=name.endswith("+"), is_regularized=True)


@pytest.mark.parametrize("rule", SESSION_RULE.names())
@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_built_in_advantage_passes_with_every_session_rule(name, rule):
    estimator = ADVANTAGES.get(name)

    def with_rule(rows: RewardedRows):
        fields = ("rewards", "group", "session", "output", "loss_mask", "offsets", "columns", "row_columns")
        return estimator(
            RewardedRows(**{field: getattr(rows, field) for field in fields}, session_rule=SESSION_RULE.get(rule))
        )

    for seed in range(3):
        check_advantage(with_rule, is_batchwide=name in BATCHWIDE, seed=seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_every_built_in_value_loss_passes(clip, seed):
    check_value_loss(value_objective(clip=clip), seed=seed)


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


def of_sessions(rows, values):
    lengths = rows.offsets.diff()
    return {"advantages": torch.where(rows.loss_mask, values.repeat_interleave(lengths), 0.0)}


def centers_over_the_batch(rows):
    return of_sessions(rows, rows.rewards - rows.rewards.mean())


def forgets_masked_tokens(rows):
    return {"advantages": of_sessions(rows, rows.rewards)["advantages"] + 1.0}


def reads_masked_tokens(rows):
    return of_sessions(rows, rows.rewards + torch.nan_to_num(rows.columns["values"]).clamp(-9, 9).sum())


def goes_by_the_order(rows):
    return of_sessions(rows, rows.rewards - rows.rewards[0])


def goes_by_the_number(rows):
    return of_sessions(rows, rows.rewards * rows.group)


def gives_float32(rows):
    return {name: values.float() for name, values in of_sessions(rows, rows.rewards).items()}


def gives_nothing(rows):
    return {"returns": of_sessions(rows, rows.rewards)["advantages"]}


def gives_nan(rows):
    return of_sessions(rows, rows.rewards / 0.0)


def writes_into_the_rewards(rows):
    return of_sessions(rows, rows.rewards.clone().copy_(rows.rewards.add_(1.0)) - 1.0)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (centers_over_the_batch, "rewards must reach no other"),
        (forgets_masked_tokens, "must be 0 at masked tokens"),
        (reads_masked_tokens, "masked tokens must not count"),
        (goes_by_the_order, "order of the rows must not matter"),
        (goes_by_the_number, "numbers of groups and sessions"),
        (gives_float32, "found .* torch.float32"),
        (gives_nothing, "must give 'advantages'; found \\['returns'\\]"),
        (gives_nan, "advantages must be finite"),
        (writes_into_the_rewards, "must"),
    ],
)
def test_broken_advantages_are_caught(broken, rule):
    with pytest.raises(ConformanceError, match=rule):
        check_advantage(broken)


def value_loss_of(values, micro, *, mean=False, poison=False, detach=False):
    mask, weights = (micro.columns[name] for name in ("loss_mask", "loss_weights"))
    errors = torch.where(mask, values - micro.columns["returns"], 0.0).square()
    errors = errors.detach() if detach else errors
    if mean:
        return errors.sum() / mask.sum().clamp(min=1), {}
    return (errors * (weights if poison else torch.where(mask, weights, 0.0))).sum(), {}


def test_broken_value_losses_are_caught():
    check_value_loss(value_loss_of)
    for options, rule in (
        ({"mean": True}, "micro-batches must add up"),
        ({"poison": True}, "masked tokens must not count"),
        ({"detach": True}, "must depend on values without detaching"),
    ):
        with pytest.raises(ConformanceError, match=rule):
            check_value_loss(partial(value_loss_of, **options))
    with pytest.raises(ConformanceError, match="predicts the returns must get no gradient"):
        check_value_loss(lambda values, micro: value_loss_of(values + 1.0, micro))


def test_example_rows_have_a_session_of_two_trajectories():
    rows = example_rows()
    pairs = torch.stack([rows.group, rows.session], dim=1)
    assert len(torch.unique(pairs, dim=0)) == len(rows.rewards) - 1


def test_example_has_what_the_checks_need():
    example = example_batch()
    columns = example.micro.columns
    mask = columns["loss_mask"]
    assert mask.any()
    assert not mask[example.micro.offsets[:-1]].any()
    assert (columns["advantages"] > 0).any()
    assert (columns["advantages"] < 0).any()
    assert float(columns["loss_weights"].sum()) == pytest.approx(1.0)
