"""The kind of training decides which rules apply."""

import json

import numpy as np
import pytest
from made_up_metrics import NO_REWARD, STEPS, healthy, history, noise

from rl_metrics.health import GUIDE, judge
from rl_metrics.health.judging import judge_run
from rl_metrics.health.rules import FAMILIES, FAMILY_TEXTS, family_of
from rl_metrics.run_files.run_record import open_run

LEARNT = 1 - np.exp(-np.arange(STEPS) / 12)
DISTILLED = {
    **{name: column for name, column in healthy().items() if not name.startswith(("actor/", "critic/advantages"))},
    "critic/score/mean": 0.354 + 0.55 * LEARNT + noise(0.015),
    "actor/distillation/loss": 1.4 - 1.2 * LEARNT,
    "actor/loss": 1.4 - 1.2 * LEARNT,
    "actor/grad_norm": 6 - 4 * LEARNT,
    "actor/entropy": 0.1 + 0.6 * LEARNT,
}
FLAT = {"critic/score/mean": np.full(STEPS, 0.3) + noise(0.005), "response_length/mean": 5 + 20 * LEARNT}


def found(values, **options):
    return [finding.rule for finding in judge(history(values), **options).findings]


@pytest.mark.parametrize("change", [{}, FLAT, NO_REWARD])
def test_rules_of_policy_gradients_say_nothing_of_distillation(change):
    verdict = judge(history(DISTILLED | change))
    assert verdict.findings == ()
    checks = {check.rule: check for check in verdict.checks}
    for rule in ("policy_loss", "grad_norm", "grad_jump", "reward_zero", "entropy_rise"):
        assert (checks[rule].status, checks[rule].reading) == ("unknown", "does not apply to distillation")


def test_a_student_that_is_sick_is_found():
    assert found(DISTILLED | {"response_length/clip_ratio": np.full(STEPS, 0.5)}) == ["truncated"]
    heavy_tailed = np.where(np.arange(STEPS) == 40, 30.0, 3.0)  # like the gradients of k3
    assert found(DISTILLED | {"actor/grad_norm": heavy_tailed}) == []
    broken = DISTILLED["critic/score/mean"] * np.where(np.arange(STEPS) < 30, 1.0, 0.2)
    assert found(DISTILLED | {"critic/score/mean": broken}) == ["reward_fell"]


def test_a_run_with_both_has_to_be_rewarded():
    values = DISTILLED | NO_REWARD
    assert "reward_zero" in found(values, family="mixed")
    assert "entropy_rise" in found(values, family="policy_gradient")
    assert "entropy_rise" not in found(values, family="mixed")


@pytest.mark.parametrize(
    ("settings", "family"),
    [("", "distillation"), ("use_task_rewards = false", "distillation"), ("use_task_rewards = true", "mixed")],
)
def test_a_recorded_run_says_what_it_learns_from(tmp_path, settings, family):
    rows = [{"step": step, "actor/distillation/loss": 1.0, "critic/score/mean": 0.0} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "settings.toml").write_text(f"[distillation]\n{settings}\n")
    run = open_run(tmp_path)
    assert family_of(run.history.values, run.settings) == family
    assert [one.rule for one in judge_run(run).findings] == (["reward_zero"] if family == "mixed" else [])


def test_a_run_without_teachers_is_a_policy_gradient():
    assert family_of(["actor/loss"], {"distillation": {"use_task_rewards": True}}) == "policy_gradient"
    assert family_of(["actor/distillation/loss"], {"distillation": 3}) == "distillation"


def test_every_rule_is_for_some_family_and_no_family_is_without_rules():
    assert FAMILY_TEXTS.keys() == {*FAMILIES}
    for family in FAMILIES:
        assert {"task", "stability", "efficiency"} <= {rule.side for rule in GUIDE if family in rule.families}
