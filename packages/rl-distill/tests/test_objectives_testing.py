"""The conformance kit accepts correct objectives, and each of its rules detects its violation."""

import math
from functools import partial

import pytest
import torch

from rl_core.errors import DataError, ShapeError
from rl_distill.objectives import (
    ADVANTAGES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    SESSION_RULES,
    PolicyObjectiveOptions,
    RewardedRows,
    TokenLosses,
    ValueObjective,
    policy_objective,
)
from rl_distill.objectives.policy_loss import ppo_clip
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
"""Their gradient is the logprob's, times a detached weight. For gpg this is also the derivative."""

BATCHWIDE = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "lite_ppo")
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


def climbs(tokens):
    return TokenLosses(losses=-plain(tokens).losses)


def returns_a_tensor(tokens):
    return plain(tokens).losses


def returns_a_tuple(tokens):
    return plain(tokens).losses, {}


def returns_a_sum(tokens):
    return TokenLosses(losses=plain(tokens).losses.sum())


def returns_a_text(tokens):
    return TokenLosses(losses="1.0")


def returns_a_mean_diagnostic(tokens):
    return TokenLosses(losses=plain(tokens).losses, diagnostics={"actor/ratio": tokens.log_ratio().exp().mean()})


def returns_a_bare_diagnostic(tokens):
    return TokenLosses(losses=plain(tokens).losses, diagnostics=tokens.log_ratio())


def scales_the_advantages(tokens):
    return TokenLosses(losses=-tokens.advantages.mul_(2.0) * tokens.log_ratio().exp())


def shifts_the_logprobs(tokens):
    losses = plain(tokens).losses
    tokens.policy_logprobs.sub_(1.0)
    return TokenLosses(losses=losses)


def clears_the_mask(tokens):
    losses = plain(tokens).losses
    tokens.loss_mask.logical_not_()
    return TokenLosses(losses=losses)


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


def gives_an_extreme(policy_logprobs, _entropy, micro):
    """Report the minimum over tokens with a positive advantage, which a micro-batch may lack."""
    mask = micro.columns["loss_mask"] & (micro.columns["advantages"] > 0)
    lowest = torch.where(mask, policy_logprobs.detach(), math.inf).amin()
    return policy_gradient(policy_logprobs, micro), {"actor/logprob_min": (lowest, mask.sum())}


def sums_an_extreme(policy_logprobs, _entropy, micro):
    mask = micro.columns["loss_mask"]
    total = torch.where(mask, policy_logprobs.detach(), 0.0).sum()
    return policy_gradient(policy_logprobs, micro), {"actor/logprob_min": (total, mask.sum())}


def policy_gradient(policy_logprobs, micro):
    mask = micro.columns["loss_mask"]
    logprobs, advantages = (torch.where(mask, x, 0.0) for x in (policy_logprobs, micro.columns["advantages"]))
    return -(advantages * logprobs).sum()


def gives_the_loss_alone(policy_logprobs, _entropy, micro):
    return policy_gradient(policy_logprobs, micro)


def gives_three_things(policy_logprobs, _entropy, micro):
    return policy_gradient(policy_logprobs, micro), {}, {}


def gives_a_number(policy_logprobs, _entropy, micro):
    return policy_gradient(policy_logprobs, micro).item(), {}


def gives_losses_of_tokens(policy_logprobs, _entropy, micro):
    return policy_logprobs * policy_gradient(policy_logprobs, micro), {}


def gives_metrics_without_weight(policy_logprobs, _entropy, micro):
    loss = policy_gradient(policy_logprobs, micro)
    return loss, {"actor/x": loss.detach()}


def gives_no_metrics(policy_logprobs, _entropy, micro):
    return policy_gradient(policy_logprobs, micro), None


def blanks_a_column(policy_logprobs, _entropy, micro):
    micro.columns["advantages"][~micro.columns["loss_mask"]] = 0.0
    return policy_gradient(policy_logprobs, micro), {}


def adds_a_column(policy_logprobs, _entropy, micro):
    micro.columns["ratio"] = policy_logprobs.detach().exp()
    return policy_gradient(policy_logprobs, micro), {}


def scales_the_logprobs(policy_logprobs, _entropy, micro):
    return policy_gradient(policy_logprobs.mul_(2.0), micro), {}


def scales_the_entropy(policy_logprobs, entropy, micro):
    entropy.detach().mul_(2.0)
    return policy_gradient(policy_logprobs, micro), {}


def pushes_the_wrong_way(policy_logprobs, _entropy, micro):
    return -policy_gradient(policy_logprobs, micro), {}


def learns_from_mistakes_alone(policy_logprobs, _entropy, micro):
    mask = micro.columns["loss_mask"]
    logprobs, advantages = (torch.where(mask, x, 0.0) for x in (policy_logprobs, micro.columns["advantages"]))
    return -(advantages.clamp(max=0.0) * logprobs).sum(), {}


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
        POLICY_LOSSES.get(name),
        has_stop_gradient=name in STOP_GRADIENT,
        is_regularized=name in ("kl_cov", "dro"),
        seed=seed,
    )


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_every_built_in_kl_passes(name):
    objective = policy_objective(PolicyObjectiveOptions(kl_coefficient=0.2, kl_estimator=name))
    check_objective(objective, has_stop_gradient=name.endswith("+"), is_regularized=True)


@pytest.mark.parametrize("rule", SESSION_RULES.names())
@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_built_in_advantage_passes_with_every_session_rule(name, rule):
    estimator = ADVANTAGES.get(name)

    def with_rule(rows: RewardedRows):
        fields = ("rewards", "group", "session", "output", "loss_mask", "offsets", "columns", "row_columns")
        return estimator(
            RewardedRows(**{field: getattr(rows, field) for field in fields}, session_rule=SESSION_RULES.get(rule))
        )

    for seed in range(3):
        check_advantage(with_rule, is_batchwide=name in BATCHWIDE, seed=seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_every_built_in_value_loss_passes(clip, seed):
    check_value_loss(ValueObjective(clip=clip), seed=seed)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (cispo_like, "not the derivative"),
        (ignores_advantages, "zero advantages must give zero gradients"),
        (divides_by_the_micro_batch, "micro-batches must add up"),
        (whitens_over_the_micro_batch, "micro-batches must add up"),
        (detached, "has no gradient"),
        (climbs, "must lower the loss if its advantage is positive"),
        (returns_a_tensor, r"must return TokenLosses\(.*; found a tensor of shape \[23\] and dtype torch.float64"),
        (returns_a_tuple, r"must return TokenLosses\(.*; found a tuple of \(a tensor of shape \[23\] .*, dict {}\)"),
        (returns_a_sum, r"T = 23; the losses are a tensor of shape \[\]"),
        (returns_a_mean_diagnostic, r"diagnostic 'actor/ratio' is a tensor of shape \[\]"),
        (scales_the_advantages, r"the policy loss must not change its inputs.* it changed advantages in place"),
        (shifts_the_logprobs, "changed policy_logprobs in place"),
        (clears_the_mask, "changed loss_mask in place"),
    ],
)
def test_broken_policy_losses_are_caught(broken, rule):
    with pytest.raises(ConformanceError, match=rule):
        check_policy_loss(broken)


@pytest.mark.parametrize(
    ("broken", "refused"),
    [
        (returns_a_text, r"losses of TokenLosses must be a Tensor; found '1.0' \(str\)"),
        (
            returns_a_bare_diagnostic,
            r"diagnostics of TokenLosses must be a mapping, .*; found torch.float64 of shape \[23\]",
        ),
    ],
)
def test_losses_of_the_wrong_type_are_refused_where_they_are_made(broken, refused):
    with pytest.raises((DataError, ShapeError), match=refused):
        check_policy_loss(broken)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (masks_too_late, "masked tokens must not affect the result; with nan"),
        (forgets_the_mask, "masked tokens must"),
        (sums_a_mean, "micro-batches must add up.*loss differs"),
        (keeps_the_graph, "metric sums must be detached; actor/pg_loss"),
        (metrics_as_means, "micro-batches must add up.*actor/x differs"),
        (sums_an_extreme, "micro-batches must add up.*actor/logprob_min differs"),
        (gives_the_loss_alone, r"must return \(loss, metric sums\).*; found a tensor of shape \[\]"),
        (gives_three_things, r"must return \(loss, metric sums\).*; found a tuple of \(.*dict {}, dict {}\)"),
        (gives_a_number, "the loss is float -?[0-9]"),
        (gives_losses_of_tokens, r"the loss must be a scalar; found shape \[23\]"),
        (gives_metrics_without_weight, r"metric 'actor/x' is a tensor of shape \[\]"),
        (gives_no_metrics, "the metric sums are None"),
        (blanks_a_column, "the objective must not change its inputs.* it changed column advantages in place"),
        (adds_a_column, "it added column ratio"),
        (scales_the_logprobs, "it changed policy_logprobs in place"),
        (scales_the_entropy, "it changed entropy in place"),
        (
            pushes_the_wrong_way,
            r"must lower the loss if its advantage is positive.*follows_advantages=False\); at token",
        ),
        (learns_from_mistakes_alone, "must lower the loss.*where the gradient must be negative, it is 0"),
    ],
)
def test_broken_objectives_are_caught(broken, rule):
    with pytest.raises(ConformanceError, match=rule):
        check_objective(broken)


def test_extremes_join_as_learners_join_them():
    check_objective(gives_an_extreme)


def test_the_sign_can_be_left_out():
    check_policy_loss(climbs, follows_advantages=False)
    check_objective(pushes_the_wrong_way, follows_advantages=False)
    check_objective(learns_from_mistakes_alone, follows_advantages=False)


def test_the_sign_is_that_of_what_advantages_add():
    def pulled_back(tokens):
        return TokenLosses(losses=plain(tokens).losses + 5.0 * tokens.policy_logprobs)

    def climbs_and_is_pulled(tokens):
        return TokenLosses(losses=climbs(tokens).losses + 5.0 * tokens.policy_logprobs)

    check_policy_loss(pulled_back, is_regularized=True)
    with pytest.raises(ConformanceError, match="must lower the loss"):
        check_policy_loss(climbs_and_is_pulled, is_regularized=True)


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


def gives_a_tensor(rows):
    return of_sessions(rows, rows.rewards)["advantages"]


def gives_a_list(rows):
    return {"advantages": of_sessions(rows, rows.rewards)["advantages"].tolist()}


def blanks_the_values(rows):
    rows.columns["values"][~rows.loss_mask] = 0.0
    return of_sessions(rows, rows.rewards)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (gives_a_tensor, r"must return tensors \[T\] by column.*; found a tensor of shape \[38\]"),
        (gives_a_list, r"advantages must be a tensor \[T\]; found a list of"),
        (blanks_the_values, "the estimator must not change its inputs.* it changed column values in place"),
        (centers_over_the_batch, "rewards must not affect others"),
        (forgets_masked_tokens, "must be 0 at masked tokens"),
        (reads_masked_tokens, "masked tokens must not affect the result"),
        (goes_by_the_order, "order of the rows must not matter"),
        (goes_by_the_number, "numbering of groups and sessions"),
        (gives_float32, "found .* torch.float32"),
        (gives_nothing, "must return 'advantages'; found \\['returns'\\]"),
        (gives_nan, "advantages must be finite"),
        (writes_into_the_rewards, "it changed rewards in place"),
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
        ({"poison": True}, "masked tokens must not affect the result"),
        ({"detach": True}, "must depend on values. Do not detach"),
    ):
        with pytest.raises(ConformanceError, match=rule):
            check_value_loss(partial(value_loss_of, **options))
    with pytest.raises(ConformanceError, match=r"must return \(loss, metric sums\).*; found a tensor of shape \[\]"):
        check_value_loss(lambda values, micro: value_loss_of(values, micro)[0])
    with pytest.raises(ConformanceError, match="changed values in place"):
        check_value_loss(lambda values, micro: value_loss_of(values.mul_(2.0), micro))
    with pytest.raises(ConformanceError, match="a value must move toward its return; at token"):
        check_value_loss(lambda values, micro: (-value_loss_of(values, micro)[0], {}))
    with pytest.raises(ConformanceError, match="predicts the returns must receive no gradient"):
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
