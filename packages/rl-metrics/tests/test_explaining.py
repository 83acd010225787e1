"""Explanations in a verdict: which finding explains another, since when, and what is tolerated."""

import numpy as np
import pytest
from made_up_metrics import NO_REWARD, STEPS, from_step, healthy, history, verdict_of

from rl_metrics.health import GUIDE, judge

# -- which of two findings explains the other


def test_of_two_that_may_explain_each_other_the_first_one_does():
    broken = from_step(12, 0.6, 0.0)
    cut = {"response_length/clip_ratio": from_step(15, 0.0, 0.5)}
    verdict = verdict_of(critic__score__mean=broken, **cut)
    assert (verdict.findings[0].rule, verdict.findings[0].causes[0]) == ("reward_fell", "learning rate too high")
    [truncated] = [finding for finding in verdict.findings if finding.rule == "truncated"]
    assert truncated.causes[0] == "the policy was broken by its updates"
    cut = {"response_length/clip_ratio": from_step(5, 0.0, 0.5)}
    verdict = verdict_of(critic__score__mean=broken, **cut)
    assert verdict.findings[0].rule == "truncated"
    assert verdict.findings[1].causes[0] == "responses are cut before they have an answer"


def test_the_cause_of_a_cause_is_named_first():
    verdict = verdict_of(
        critic__score__mean=from_step(12, 0.6, 0.0),
        response_length__clip_ratio=from_step(15, 0.0, 0.5),
        rollout__positive_reward_ratio=from_step(12, 0.6, 0.0),
    )
    [rare] = [finding for finding in verdict.findings if finding.rule == "reward_rare"]
    assert rare.causes[:2] == ("the policy was broken by its updates", "responses are cut before they have an answer")


# -- missing metrics


@pytest.mark.parametrize("gone", [np.nan, np.inf])
def test_a_loss_that_is_no_number_any_more_is_found(gone):
    values = {name: healthy()[name] for name in ("actor/grad_norm", "actor/entropy", "critic/score/mean")}
    values["actor/pg_loss"] = from_step(31, 0.0, gone)
    verdict = judge(history(values))
    assert verdict.findings[0].rule == "lost_metrics"
    assert verdict.findings[0].since_step == 31
    [check] = [check for check in verdict.checks if check.rule == "policy_loss"]
    assert (check.status, check.reading) == (
        "unknown",
        "actor/pg_loss is missing or not finite in the last 30 steps",
    )


def test_what_never_was_a_number_is_found():
    values = {**healthy(), "actor/pg_loss": np.full(STEPS, np.nan)}
    verdict = judge(history(values))
    [finding] = [finding for finding in verdict.findings if finding.rule == "lost_metrics"]
    assert (verdict.status, finding.since_step) == ("critical", 1)
    assert finding.evidence[0].text == f"actor/pg_loss is missing or not finite in {STEPS} newest steps"
    assert judge(history({name: np.full(STEPS, np.nan) for name in values})).findings[0].rule == "lost_metrics"


def test_four_steps_without_one_are_no_finding_nor_is_what_few_steps_have():
    assert verdict_of(actor__grad_norm=np.where(np.arange(STEPS) < STEPS - 4, 0.5, np.nan)).findings == ()
    rare = np.where(np.arange(STEPS) % 5 == 0, 0.5, np.nan)
    rare[-20:] = np.nan
    assert verdict_of(actor__grad_norm=rare).findings == ()


# -- tolerated findings state the reason


def test_what_a_rising_reward_excuses_is_said():
    rising = {"critic/score/mean": np.linspace(0.1, 0.9, STEPS)}
    verdict = verdict_of(actor__grad_norm=np.full(STEPS, 50.0), **rising)
    [check] = [check for check in verdict.checks if check.rule == "grad_norm"]
    assert check.status == "ok"
    assert check.reading == "actor/grad_norm is at 50 (at most 1 is healthy), which is accepted: the reward rises"


def test_a_reward_that_was_better_before_the_first_window_has_not_risen():
    falling = {"critic/score/mean": np.linspace(-0.1, -1.0, STEPS), "critic/score/max": np.zeros(STEPS)}
    verdict = verdict_of(**falling)
    assert "reward_flat" in [finding.rule for finding in verdict.findings]


# -- causes and advice


def test_each_cause_has_its_own_advice_and_findings_say_what_explains_them():
    verdict = verdict_of(**NO_REWARD)
    for finding in verdict.findings:
        assert len(finding.causes) == len(finding.advice) > 0
        assert len(set(finding.causes)) == len(finding.causes)
    because = {finding.rule: finding.because for finding in verdict.findings}
    assert because["reward_zero"] == ()
    assert "reward_zero" in because["no_advantages"]


def test_overfitting_is_seen_where_accuracy_is_the_main_variable():
    apart = {"val-core/x/acc/mean@4": np.full(STEPS, 0.4), "val-aux/x/reward/mean@4": np.full(STEPS, 0.4)}
    assert "overfitting" in [finding.rule for finding in verdict_of(**apart).findings]


def test_what_a_condition_lets_pass_is_said_too():
    verdict = verdict_of(rollout_corr__k3_kl=np.full(STEPS, 0.08))
    [check] = [check for check in verdict.checks if check.rule == "off_policy"]
    assert check.reading.endswith("which is accepted: rollouts are from the newest weights")


def test_every_condition_says_what_its_absence_means():
    needs = [probe for rule in GUIDE for probe in rule.needs]
    assert needs
    assert all(probe.otherwise for probe in needs)
