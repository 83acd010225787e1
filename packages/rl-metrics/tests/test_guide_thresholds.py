"""Thresholds quoted as the evaluation guide's: each on a made-up run that breaks it, and on one that may."""

import numpy as np
import pytest
from made_up_metrics import STEPS, from_step, healthy, history, verdict_of

from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.health import GUIDE, judge


def judged(steps=STEPS, *, is_over=False, **changed):
    values = {name.replace("__", "/"): np.asarray(column) for name, column in changed.items()}
    verdict = judge(history(healthy(steps) | values), is_over=is_over)
    return {check.rule: check for check in verdict.checks}


LEVELS = [
    (rule, condition, DEFINITIONS.find(name).healthy)
    for rule in GUIDE
    for condition in rule.conditions
    for name in condition.reads[0]
    if condition.kind in ("level", "mean_level") and len(condition.reads) == 1 and not condition.at_end
    if name in DEFINITIONS
    and DEFINITIONS.find(name).healthy
    and (rule.name, name) != ("off_policy", "rollout_corr/k3_kl")
]
"""Conditions on the level of a metric with a healthy range; `engine_mismatch` has the range of the KL by the engine."""


@pytest.mark.parametrize(("rule", "condition", "band"), LEVELS, ids=lambda one: getattr(one, "name", None))
def test_rules_and_the_table_of_metrics_have_the_same_thresholds(rule, condition, band):
    limits = condition.limits_of(rule)
    for end, value in (("min", band.low), ("max", band.high)):
        assert value is None or limits.get(end, value) == value
    assert any(threshold.source in band.source for threshold in rule.thresholds)


@pytest.mark.parametrize(
    ("loss", "rules"),
    [
        (0.04, []),
        (0.08, ["policy_loss"]),  # as a mean over the run
        (0.2, ["policy_loss"]),
        (-0.3, ["policy_loss"]),
    ],
)
def test_a_large_mean_policy_loss_is_found(loss, rules):
    values = {"actor__pg_loss": np.full(STEPS, loss), "critic__advantages__mean": np.zeros(STEPS)}
    assert [finding.rule for finding in verdict_of(**values).findings] == rules


def test_a_policy_loss_that_is_minus_the_mean_advantage_is_no_finding():
    """With the loss by token and the advantages centred by response, it tells how long good responses are."""
    values = {"actor__pg_loss": np.full(STEPS, -0.3), "critic__advantages__mean": np.full(STEPS, 0.3)}
    check = judged(**values)["policy_loss"]
    assert check.status == "ok"
    assert "which is accepted: it is minus the tokens' mean advantage of 0.3" in check.reading
    values = {"actor__pg_loss": np.full(STEPS, -0.8), "critic__advantages__mean": np.full(STEPS, 0.8)}
    assert judged(**values)["policy_loss"].status == "warning"


@pytest.mark.parametrize(
    ("loss", "advantage"),
    [
        ([0.6] * 60 + [0.0] * 70, 0.0),
        ([0.0] * 60 + [60.0] + [0.0] * 69, 0.0),
        ([0.06] * 130, -0.011),  # cancels within the limit, but is too small to explain the loss
        ([-0.6] * 60 + [-0.3] * 70, 0.3),  # explains the newest steps only
    ],
)
def test_a_mean_of_the_policy_loss_is_not_excused_by_what_does_not_explain_it(loss, advantage):
    check = judged(130, actor__pg_loss=loss, critic__advantages__mean=np.full(130, advantage))["policy_loss"]
    assert check.status == "warning"
    assert "on average over the run" in check.reading


def test_large_advantages_of_the_newest_steps_do_not_excuse_the_mean_of_the_policy_loss():
    values = {"actor__pg_loss": np.full(130, 0.6), "critic__advantages__max": [2.5] * 115 + [50.0] * 15}
    check = judged(130, **values, critic__advantages__mean=np.zeros(130))["policy_loss"]
    assert (check.status, "on average over the run" in check.reading) == ("warning", True)


def test_a_policy_loss_of_large_advantages_has_no_range():
    values = {"actor__pg_loss": from_step(30, 0.0, 4.0), "critic__advantages__max": np.full(STEPS, 50.0)}
    checks = judged(**values)
    assert [checks[rule].status for rule in ("policy_loss", "loss_jump")] == ["ok", "ok"]
    assert "the thresholds are for advantages of about unit size" in checks["loss_jump"].reading


@pytest.mark.parametrize(("top", "rules"), [(0.35, []), (0.5, ["loss_jump"])])
def test_a_jump_of_the_policy_loss_is_found(top, rules):
    loss = np.full(STEPS, -0.04)
    loss[STEPS - 5] = top
    assert [finding.rule for finding in verdict_of(actor__pg_loss=loss).findings] == rules


def test_a_lasting_jump_of_the_policy_loss_is_found_by_its_level():
    assert "policy_loss" in {one.rule for one in verdict_of(actor__pg_loss=from_step(53, 0.0, 0.45)).findings}


def test_a_kl_of_one_update_a_batch_cannot_be_judged():
    checks = judged(actor__ppo_kl=np.full(STEPS, 2e-9))
    for rule in ("kl_high", "clip_share"):
        assert (checks[rule].status, checks[rule].applies) == ("unknown", False)
        assert "with one update a batch every ratio is 1" in checks[rule].reading
    assert judged(actor__ppo_kl=np.full(STEPS, 0.04))["kl_high"].status == "critical"
    assert judged(actor__ppo_kl=np.full(STEPS, 0.02))["kl_high"].status == "ok"


def test_a_kl_loss_has_its_limit_although_the_reward_rises():
    assert judged(actor__kl_loss=np.full(STEPS, 0.029))["kl_loss_high"].status == "ok"
    assert judged(actor__kl_loss=np.full(STEPS, 0.031))["kl_loss_high"].status == "warning"
    assert not judged()["kl_loss_high"].applies


@pytest.mark.parametrize(("entropy", "status"), [(0.9, "ok"), (1.1, "warning")])
def test_the_final_entropy_is_judged_at_the_end(entropy, status):
    changed = {"actor__entropy": np.full(STEPS, entropy)}
    assert judged(is_over=True, **changed)["entropy_final"].status == status
    check = judged(**changed)["entropy_final"]
    assert (check.status, check.reading, check.applies) == ("unknown", "judged at the end of the run", False)


def test_the_mean_of_the_gradient_norm_is_judged():
    flat = {"critic__score__mean": np.full(STEPS, 0.5)}
    assert judged(actor__grad_norm=np.full(STEPS, 0.7), **flat)["grad_norm"].status == "ok"
    assert judged(actor__grad_norm=np.full(STEPS, 0.9), **flat)["grad_norm"].status == "warning"
    check = judged(actor__grad_norm=np.full(STEPS, 0.9))["grad_norm"]
    assert check.reading.endswith(
        "(at most 0.8 is healthy), which is accepted: the reward has risen by 40.8 % of the possible gain, from 0.6057"
    )


def test_a_spread_of_rewards_that_grows():
    spread = np.linspace(0.05, 0.3, STEPS)
    assert judged(rollout__group_reward_std=spread)["reward_spread"].status == "warning"
    rare = {
        "critic__score__mean": np.linspace(0.01, 0.4, STEPS),
        "rollout__group_reward_std": np.linspace(0.02, 0.4, STEPS),
    }
    check = judged(**rare)["reward_spread"]
    assert check.status == "ok"
    assert "accepted: so much spread belongs to this mean of rewards" in check.reading


def validated(training, validation, *, is_over=False, every=5):
    column = np.full(len(training), np.nan)
    column[every - 1 :: every] = validation
    half = np.where(np.isfinite(column), 0.02, np.nan)
    name = "val-core/x/reward/mean@1"
    values = {"critic/score/mean": np.asarray(training), name: column, f"{name}/ci_high": column + half}
    return {check.rule: check for check in judge(history(values), is_over=is_over).checks}


def test_twenty_steps_with_four_validations_are_judged_and_say_how_sure():
    checks = validated(np.linspace(0.5, 0.8, 20), [0.5, 0.6, 0.7, 0.75])
    assert checks["overfitting"].status == checks["validation_fell"].status == "ok"
    assert checks["overfitting"].reading == (
        "val-core/x/reward/mean@1: a gap of 4.67 % to training's 0.7605 (a new gap of at most 20 % is healthy) "
        "(unsure: 4 of 6 values)"
    )
    checks = validated(np.linspace(0.5, 0.8, 20), [0.6, 0.4, 0.4, 0.38])
    assert checks["validation_fell"].status == "warning"
    assert "(unsure: 4 of 6 values)" in checks["validation_fell"].reading
    checks = validated(np.linspace(0.5, 0.8, 40), [0.6, 0.4, 0.4, 0.38, 0.38, 0.38, 0.38, 0.38])
    assert checks["validation_fell"].status == "warning"
    assert "unsure" not in checks["validation_fell"].reading


def test_the_gap_between_training_and_validation_is_narrower_at_the_end():
    training = np.linspace(0.5, 0.8, 40)
    behind = [0.5, 0.55, 0.6, 0.6, 0.6, 0.6, 0.61, 0.62]
    assert validated(training, behind)["overfitting"].status == "ok"
    assert validated(training, behind, is_over=True)["overfitting"].status == "warning"
    assert (
        validated(training, [0.5, 0.55, 0.6, 0.65, 0.7, 0.74, 0.75, 0.75], is_over=True)["overfitting"].status == "ok"
    )


def test_causes_mention_what_the_user_can_change():
    rules = {rule.name: rule for rule in GUIDE}
    tried = " ".join(cause.advice for cause in rules["overfitting"].causes)
    assert all(name in tried for name in ("learning rate", "algorithm.kl_coefficient"))
    assert any("ground truths" in cause.text for cause in rules["validation_fell"].causes)
