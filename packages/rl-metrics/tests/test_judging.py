"""Verdicts on made-up runs: a healthy run, one run for each fault, and arbitrary series."""

import json
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_up_metrics import NO_REWARD, STEPS, from_step, healthy, history, noise, verdict_of

from rl_core.errors import SettingsError
from rl_metrics.health import GUIDE, Verdict, judge, with_thresholds, without
from rl_metrics.health.rules import require_rules
from rl_metrics.run_files.history import History

# -- healthy


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 20, 60, 300, 2000])
def test_a_healthy_run_has_no_finding(steps):
    verdict = verdict_of(steps)
    assert verdict.findings == ()
    assert verdict.status == "ok"
    assert verdict.step == steps


def test_few_steps_are_not_judged():
    checks = {check.rule: check for check in verdict_of(4).checks}
    assert checks["reward_flat"].status == "unknown"
    assert checks["reward_flat"].reading == "4 of the 30 steps needed"
    assert checks["mfu"].reading == "the run does not record perf/mfu/*"
    assert checks["weights_proof"].status == "ok"


def test_an_empty_run_is_unknown():
    verdict = judge(History(steps=np.zeros(0, np.int64), times=np.zeros(0), values={}))
    assert (verdict.status, verdict.step, verdict.findings) == ("unknown", 0, ())
    assert len(verdict.checks) == len(GUIDE)


def test_a_task_that_is_solved_needs_no_more_reward_nor_entropy():
    verdict = verdict_of(
        critic__score__mean=np.full(STEPS, 0.99),
        rollout__groups_without_spread_ratio=np.full(STEPS, 0.97),
        critic__advantages__max=np.zeros(STEPS),
        critic__advantages__min=np.zeros(STEPS),
        actor__entropy=np.linspace(0.25, 0.001, STEPS),
    )
    assert verdict.findings == ()


# -- faults


def test_a_learning_rate_that_is_too_high_is_found():
    verdict = verdict_of(
        critic__score__mean=from_step(8, 0.55, 0.0),
        rollout__groups_without_spread_ratio=from_step(8, 0.3, 1.0),
        critic__advantages__max=from_step(9, 2.5, 0.0),
        critic__advantages__min=from_step(9, -2.5, 0.0),
        actor__entropy=from_step(8, 0.25, 2.5),
        actor__grad_norm=np.where(np.arange(STEPS) < 5, 0.6, np.where(np.arange(STEPS) < 9, 20.0, 0.0)),
        response_length__clip_ratio=from_step(8, 0.0, 0.9),
    )
    assert verdict.status == "critical"
    first = verdict.findings[0]
    assert first.rule == "entropy_rise"
    assert first.causes[0] == "learning rate too high"
    assert {"reward_fell", "truncated", "no_advantages", "without_spread"} <= {one.rule for one in verdict.findings}


def test_reward_always_zero():
    verdict = verdict_of(
        **NO_REWARD,
        actor__grad_norm=np.zeros(STEPS),
        actor__pg_loss=np.zeros(STEPS),
        actor__entropy=np.full(STEPS, 0.25),
        actor__kl_loss=np.zeros(STEPS),
    )
    first = verdict.findings[0]
    assert (first.rule, first.since_step) == ("reward_zero", 1)
    assert first.causes[0].startswith("the reward function does not find answers")
    rest = {finding.rule: finding for finding in verdict.findings[1:]}
    assert {"reward_flat", "reward_rare", "no_advantages", "without_spread", "policy_held"} == rest.keys()
    assert rest["no_advantages"].causes[0] == "every reward is 0"


def test_stale_weights_are_found():
    grows = np.linspace(0.0, 0.2, STEPS)
    verdict = verdict_of(
        critic__score__mean=0.55 + noise(0.01),
        actor__entropy=np.full(STEPS, 0.25),
        response_length__mean=np.full(STEPS, 5.3),
        training__rollout_probs_diff_mean=grows,
        training__rollout_actor_probs_pearson_corr=1 - 2 * grows,
        rollout_corr__k3_kl=3 * grows,
        actor__pg_clipfrac=2 * grows,
        actor__ppo_kl=grows,
    )
    first = verdict.findings[0]
    assert first.rule == "engine_mismatch"
    assert first.causes[0].startswith("stale weights")
    causes = {finding.rule: finding.causes[0] for finding in verdict.findings}
    assert causes["kl_high"] == causes["clip_share"] == "engine and learner compute different probabilities"


def test_a_failed_proof_comes_before_the_mismatch_that_it_explains():
    verdict = verdict_of(
        weights__canary_max_diff=from_step(30, 1e-6, 2.0),
        training__rollout_probs_diff_mean=from_step(30, 1e-6, 0.2),
        rollout_corr__k3_kl=from_step(30, 1e-6, 0.5),
    )
    assert [finding.rule for finding in verdict.findings] == ["weights_proof", "engine_mismatch"]
    assert verdict.findings[0].since_step == 30


def test_a_proof_that_ended_the_run_is_found_in_its_events():
    events = [
        {"event": "run_started"},
        {"event": "run_failed", "error": "WeightProofError: tensor lm_head differs", "step": 12},
    ]
    (finding,) = judge(history(healthy()), events=events).findings
    assert (finding.rule, finding.since_step) == ("weights_proof", 12)
    assert finding.evidence[0].text == "WeightProofError: tensor lm_head differs"
    assert judge(history(healthy()), events=[*events, {"event": "run_resumed"}]).findings == ()


def test_a_mismatch_from_the_first_step_is_no_stale_weights():
    verdict = verdict_of(training__rollout_probs_diff_mean=np.full(STEPS, 0.05))
    assert verdict.findings[0].rule == "engine_mismatch"
    assert verdict.findings[0].causes[0].startswith("engine and learner use different templates")


def test_old_rollouts_may_differ():
    verdict = verdict_of(
        training__staleness__mean=np.full(STEPS, 2.0),
        training__rollout_probs_diff_mean=np.full(STEPS, 0.03),
        rollout_corr__k3_kl=np.full(STEPS, 0.02),
    )
    assert verdict.findings == ()


def test_a_kl_penalty_that_is_too_strong_is_found():
    verdict = verdict_of(
        critic__score__mean=0.55 + noise(0.015),
        actor__entropy=np.full(STEPS, 0.25),
        actor__kl_loss=np.full(STEPS, 0.0004),
        actor__kl_coef=np.full(STEPS, 10.0),
        response_length__mean=np.full(STEPS, 5.3),
    )
    first = verdict.findings[0]
    assert (first.rule, first.causes[0]) == ("policy_held", "the KL penalty is too strong")
    assert any(evidence.metric == "actor/kl_coef" for evidence in first.evidence)
    assert [finding.rule for finding in verdict.findings] == ["policy_held", "reward_flat"]


def test_entropy_collapse_is_found_first():
    verdict = verdict_of(
        critic__score__mean=0.55 + noise(0.01),
        actor__entropy=0.25 * np.exp(-np.arange(STEPS) / 6.0) + 0.001,
        rollout__groups_without_spread_ratio=np.linspace(0.3, 1.0, STEPS),
    )
    assert [finding.rule for finding in verdict.findings][:1] == ["entropy_collapse"]
    assert {"without_spread", "reward_flat"} <= {finding.rule for finding in verdict.findings}


def test_truncated_responses_are_found_first():
    verdict = verdict_of(
        **NO_REWARD,
        response_length__clip_ratio=np.ones(STEPS),
    )
    first = verdict.findings[0]
    assert (first.rule, first.causes[0]) == ("truncated", "the limit is too low for the task")
    assert verdict.findings[1].rule == "reward_zero"
    assert verdict.findings[1].causes[0] == "responses are cut before they have an answer"


def test_a_slow_reward_is_found():
    verdict = verdict_of(
        timing_s__reward=from_step(20, 0.001, 2.0),
        timing_s__step=from_step(20, 1.5, 3.5),
        perf__throughput=from_step(20, 5000.0, 2000.0),
    )
    first = verdict.findings[0]
    assert (first.rule, first.since_step) == ("reward_slow", 24)  # five of the ten values of the window
    assert first.causes[0].startswith("slow reward")
    assert [finding.rule for finding in verdict.findings[1:]] == ["step_time_drift"]


def test_a_leak_names_its_owner():
    verdict = verdict_of(memory__trainer_gb=1.2 + 0.02 * np.arange(STEPS))
    (finding,) = verdict.findings
    assert (finding.rule, finding.severity) == ("memory", "critical")
    assert [evidence.metric for evidence in finding.evidence] == ["memory/trainer_gb"]
    assert finding.causes[0].startswith("a leak")


def test_memory_is_told_in_the_unit_of_its_metric():
    steady = np.full(STEPS, 2.5)
    verdict = verdict_of(memory__trainer_gb=steady, memory__trainer_python_blocks=1e6 * steady)
    (check,) = (check for check in verdict.checks if check.rule == "memory")
    assert "from 2.5 GiB" in check.reading
    assert "from 2.5e+06 blocks" in check.reading


def test_memory_that_settles_is_no_leak():
    assert verdict_of(memory__trainer_gb=2.0 - np.exp(-np.arange(STEPS) / 5.0)).findings == ()


def test_overfitting_and_components():
    validation = np.full(STEPS, np.nan)
    validation[4::5] = np.linspace(0.6, 0.5, 12)
    values = {"val-core/arithmetic/reward/mean@1": validation, "reward/format/mean": np.linspace(0.9, 0.2, STEPS)}
    verdict = judge(history(healthy() | values))
    assert {finding.rule for finding in verdict.findings} == {"overfitting", "component_fell"}
    evidence = next(one for one in verdict.findings if one.rule == "overfitting").evidence[0]
    assert evidence.metric == "val-core/arithmetic/reward/mean@1"


def test_a_gap_within_the_confidence_interval_is_none():
    validation = np.full(STEPS, np.nan)
    validation[4::5] = 0.5
    values = {
        "val-core/arithmetic/reward/mean@1": validation,
        "val-core/arithmetic/reward/mean@1/ci_high": validation + 0.3,
    }
    assert judge(history(healthy() | values)).findings == ()


def test_efficiency_and_lost_rollouts():
    verdict = verdict_of(
        fully_async__trainer__idle_ratio=np.full(STEPS, 0.7),
        timing_s__step=np.where(np.isin(np.arange(STEPS), [40, 45, 50, 55]), 9.0, 1.5),
        rollout__failed_sessions=np.full(STEPS, 1536.0),
        actor__skipped_updates=from_step(55, 0, 1),
    )
    assert {finding.rule for finding in verdict.findings} == {
        "learner_idle",
        "step_time_jump",
        "lost_rollouts",
        "not_finite",
    }
    (lost,) = [finding for finding in verdict.findings if finding.rule == "lost_rollouts"]
    assert lost.evidence[0].text.startswith("rollout/failed_sessions: 75 %")
    assert lost.evidence[0].text.endswith(" % of the sessions (at most 10 % is healthy)")


def test_the_newest_reason_of_failed_rewards_is_evidence():
    def said(step, error):
        return {"event": "sessions_failed", "step": step, "error": error}

    events = [said(1, "first"), said(2, "newest"), {"event": "other", "error": "else"}]
    values = healthy() | {"rollout/failed_rewards": np.full(STEPS, 3.0)}
    (finding,) = judge(history(values), events=events).findings
    assert [one.text for one in finding.evidence] == ["rollout/failed_rewards: 3 sessions in a step", "newest"]
    assert judge(history(healthy() | {"rollout/failed_rewards": np.zeros(STEPS)}), events=events).findings == ()


# -- thresholds


def test_thresholds_of_a_user_replace_the_guides():
    values = healthy() | {"actor/ppo_kl": np.full(STEPS, 0.04)}
    assert [one.rule for one in judge(history(values)).findings] == ["kl_high"]
    assert judge(history(values), thresholds={"kl_high.max": 0.05}).findings == ()
    assert judge(history(values), rules=without(GUIDE, ["kl_high"])).findings == ()
    assert judge(history(values), rules=with_thresholds(GUIDE, {"kl_high.max": 0.05})).findings == ()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: judge(history(healthy()), thresholds={"kl_hig.max": 1}), "nearest is 'kl_high.max'"),
        (lambda: without(GUIDE, ["memry"]), "nearest is 'memory'"),
        (lambda: require_rules(GUIDE, ["critcal"], also=("critical", "warning")), "nearest is 'critical'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(act, said):
    with pytest.raises(SettingsError, match=said):
        act()


# -- arbitrary contents of a run


def test_a_verdict_of_a_sick_run_goes_to_json_and_back():
    verdict = verdict_of(memory__trainer_gb=1.2 + 0.02 * np.arange(STEPS), actor__ppo_kl=np.full(STEPS, 0.5))
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


NAMES = sorted(
    {
        name.replace("*", "x").replace("#", "1")
        for rule in GUIDE
        for condition in (*rule.conditions, *rule.needs, *rule.unless)
        for names in condition.reads
        for name in names
    }
)


@settings(max_examples=150)
@given(st.data())
def test_no_series_breaks_a_rule(data):
    steps = data.draw(st.integers(0, 60))
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=len(NAMES)))
    columns = st.one_of(
        arrays(np.float64, steps, elements=st.floats()),
        arrays(np.float64, steps, elements=st.sampled_from([0.0, 1.0, np.nan, np.inf, -np.inf, 1e308, 1e-300])),
        st.floats().map(lambda value: np.full(steps, value)),
    )
    values = {name: data.draw(columns) for name in names}
    record = History(steps=np.arange(steps, dtype=np.int64), times=np.zeros(steps), values=values)
    verdict = judge(record)
    assert [check.rule for check in verdict.checks] == [rule.name for rule in GUIDE]
    assert {finding.rule for finding in verdict.findings} == {
        c.rule for c in verdict.checks if c.status in ("warning", "critical")
    }
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))).status == verdict.status
    for finding in verdict.findings:
        assert finding.evidence
        assert finding.causes
        assert len(finding.advice) >= 1
        assert 0 <= finding.since_step <= max(steps - 1, 0)


EVENTS = st.dictionaries(
    st.sampled_from(["event", "error", "step", "time"]),
    st.none()
    | st.text(string.printable, max_size=8)
    | st.sampled_from(["run_failed", "WeightProofError", -3, 1.5, True]),
)


@given(st.lists(EVENTS, max_size=5))
def test_no_event_breaks_a_rule(events):
    found = judge(history(healthy(5)), events=events)
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found


# -- the checklist


def test_no_line_praises_what_is_gone():
    """Rewards have fallen to 0 for good: no check praises a reward of 0."""
    gone = from_step(31, 0.6, 0.0)
    verdict = verdict_of(critic__score__mean=gone, critic__score__max=from_step(31, 1.0, 0.0))
    checks = {check.rule: check for check in verdict.checks}
    assert checks["reward_fell"].status == checks["reward_zero"].status == "critical"
    because = {finding.rule: finding.because for finding in verdict.findings}
    assert "reward_fell" in because["reward_zero"]
    praised = [check.rule for check in verdict.checks if check.status == "ok" and "score/mean 0" in check.reading]
    assert praised == []


def test_what_is_well_is_put_as_it_was_measured():
    few = np.where(np.arange(STEPS) % 5 == 0, 0.002, 0.0)  # the median of each window is 0
    verdict = verdict_of(critic__score__mean=few, critic__score__max=np.where(few > 0, 1.0, 0.0))
    checks = {check.rule: check for check in verdict.checks}
    assert checks["reward_zero"].status == "ok"
    assert checks["reward_zero"].reading == "rewards are within ±1 in the last 10 steps"
    assert checks["reward_fell"].reading == (
        "critic/score/mean is 100 % below its best of 0.002 (at most 25 % is healthy)"
    )


def test_penalties_that_are_no_longer_paid_are_no_lack_of_rewards():
    paid = from_step(20, -0.5, 0.0)
    verdict = verdict_of(critic__score__mean=paid, critic__score__max=np.zeros(STEPS), critic__score__min=2 * paid)
    assert "reward_zero" not in {finding.rule for finding in verdict.findings}


def test_what_a_run_may_lack_is_not_said_to_be_missing():
    checks = {check.rule: check for check in judge(history({"actor/entropy": np.full(STEPS, 0.3)})).checks}
    assert checks["validation_fell"].reading == "the run does not record val-core/*/mean@#"
