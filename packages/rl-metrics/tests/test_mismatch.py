import math
import re
from dataclasses import replace

import numpy as np
import pytest
from mismatched_tokens import MismatchedRun

from rl_metrics.doctor.diagnosis import Diagnosis, NoFinding
from rl_metrics.doctor.mismatch import diagnose_mismatch, diagnose_tokens, read_pairs
from rl_metrics.doctor.mismatch_causes import Facts, grows
from rl_metrics.run_files.rollout_log import RolloutLog, RolloutRow
from rl_metrics.run_files.run_record import open_run

EXACT = Facts(engine_dtype="float32", learner_dtype="float32")
ROUNDED = Facts(engine_dtype="bfloat16", learner_dtype="float32")
SHORT = {"steps": 12, "tokens": 6}
LONG = {"steps": 30, "tokens": 24}
pytestmark = pytest.mark.one_python("its work is numpy's")


def judge(facts, **options):
    return diagnose_tokens(read_pairs(MismatchedRun(**options).rows()), facts)


def names(found):
    assert isinstance(found, Diagnosis), found
    return [cause.name for cause in found.causes]


@pytest.mark.parametrize(("seed", "size"), [(0, SHORT), (1, LONG)])
@pytest.mark.parametrize(
    ("expected", "facts", "options"),
    [
        ("stale_weights", EXACT, {"is_frozen": True}),
        ("stale_weights", EXACT, {"is_frozen": True, "learning_rate": 0.3}),
        ("stale_weights", ROUNDED, {"is_frozen": True, "is_bfloat16": True}),
        ("stale_weights", EXACT, {"lag": 1, "learning_rate": 0.1}),
        ("stale_weights", EXACT, {"stuck_version": 0, "learning_rate": 0.1}),
        ("stale_rollouts", EXACT, {"old": 8, "learning_rate": 1.2}),
        ("template", EXACT, {"template": 1.0}),
        ("template", ROUNDED, {"template": 2.0, "is_bfloat16": True}),
        ("truncation", EXACT, {"top_p": 0.9}),
        ("truncation", EXACT, {"top_p": 0.8, "learning_rate": 0.4}),
        ("truncation", EXACT, {"top_k": 5}),
        ("truncation", ROUNDED, {"top_p": 0.9, "is_bfloat16": True}),
        ("other_computation", EXACT, {"temperature": 0.6}),
        ("other_computation", EXACT, {"temperature": 1.3}),
        ("precision", EXACT, {"is_bfloat16": True}),
        ("other_computation", EXACT, {"swapped": 0.03}),
        ("other_computation", ROUNDED, {"swapped": 0.06, "noise": 0.01}),
        ("other_computation", EXACT, {"wrong": 0.3}),
    ],
)
def test_each_cause_comes_first(expected, facts, options, seed, size):
    assert names(judge(facts, seed=seed, **options, **size))[0] == expected


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_causes_are_both_named(seed):
    assert set(names(judge(EXACT, seed=seed, template=2.0, top_p=0.9, **LONG))) == {"template", "truncation"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("facts", "options"),
    [
        (EXACT, {}),
        (Facts(), {}),
        (ROUNDED, {"is_bfloat16": True}),
        (ROUNDED, {"noise": 0.02}),
        (EXACT, {"old": 2, "learning_rate": 0.02}),
    ],
)
def test_a_healthy_run_has_no_mismatch(facts, options, seed):
    found = judge(facts, seed=seed, **options, **SHORT)
    assert isinstance(found, NoFinding), found
    assert found.state == "right"


def test_what_is_said_has_figures():
    found = judge(Facts(cuts=("rollout.top_p = 0.9",)), top_p=0.9, **SHORT)
    (cause,) = found.causes
    assert cause.share == pytest.approx(1.0)
    assert cause.evidence[-1].text == "rollout.top_p = 0.9"
    size, position, step, direction = found.evidence
    assert size.value == pytest.approx(0.09, abs=0.02)
    assert re.fullmatch(r"[\d.]+ nats at token 2 and later, [\d.]+ at the first token", position.text)
    assert re.fullmatch(r"[\d.]+ nats up to step 1, [\d.]+ up to step 12", step.text)
    assert direction.text.startswith("0 % of the difference is upward")


def test_old_tokens_are_compared_with_new_ones():
    found = judge(EXACT, old=8, learning_rate=1.2, **LONG)
    assert found.causes[0].evidence[0].text in [evidence.text for evidence in found.evidence]
    assert re.fullmatch(
        r"[\d.e-]+ nats of weights up to 0 versions old, [\d.]+ up to 8", found.causes[0].evidence[0].text
    )


FAILED = Facts(failed_proofs=("the proof of a weight update failed 2 times: tensor a",))


def test_a_failed_proof_names_stale_weights_whatever_the_tokens_say():
    assert names(judge(FAILED, **SHORT)) == ["stale_weights"]


def test_a_failed_proof_explains_what_no_other_cause_does():
    (cause,) = judge(FAILED, wrong=0.3, **SHORT).causes
    assert cause.name == "stale_weights"
    assert names(judge(FAILED, top_p=0.9, **LONG)) == ["stale_weights", "truncation"]


@pytest.mark.parametrize(
    ("first", "said"),
    [(1, "present from the first step on"), (4, "present from step 4 on, the first recorded one")],
)
def test_no_more_is_said_of_first_steps_than_is_recorded(first, said):
    rows = [replace(row, step=row.step + first - 1) for row in MismatchedRun(wrong=0.3, **SHORT).rows()]
    cause = diagnose_tokens(read_pairs(rows), EXACT).causes[0]
    assert cause.name == "other_computation"
    assert cause.evidence[0].text.endswith(said)
    assert "first step" not in cause.title


def test_settings_that_may_explain_the_rest_are_told():
    cause = judge(Facts(suspects=("rollout.temperature is 0.8",)), swapped=0.1, **SHORT).causes[0]
    assert (cause.name, cause.evidence[-1].text) == ("other_computation", "rollout.temperature is 0.8")


def test_few_outliers_are_no_growth():
    random = np.random.default_rng(0)
    usual, later = np.abs(random.normal(size=(2, 300)))
    assert not grows(usual, later)
    later[:60] += 12.0
    assert later.mean() > 3 * usual.mean()
    assert not grows(usual, later)
    assert grows(usual, 4 * later)


def test_too_few_tokens_are_judged_by_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    log = RolloutLog(tmp_path / "rollouts.jsonl", clock=lambda: 5.0)
    log.write(list(MismatchedRun(steps=1, trajectories=2, tokens=5, wrong=1.0).rows()))
    log.close()
    found = diagnose_mismatch(open_run(tmp_path))
    assert isinstance(found, NoFinding)
    assert (found.state, found.text.partition(",")[0]) == ("unknown", "fewer than 30 tokens have both logprobs")


def row(**columns):
    fields = {"step": 1, "time": 0.0, "prompt_uid": "p", "problem": "p", "prompt": "", "response": ""}
    return RolloutRow(
        **{**fields, "policy_version": columns.pop("policy_version", 3)},
        tokens=("a", "b", "c"),
        mask=columns.pop("mask", (True, True, True)),
        columns=columns,
    )


def test_pairs_are_the_sampled_tokens_with_both_logprobs():
    pairs = read_pairs(
        [
            row(rollout_logprobs=(-1.0, -2.0, math.nan), policy_logprobs=(-1.5, -2.0, -3.0), versions=(2, 3, 3)),
            row(rollout_logprobs=(-1.0, -2.0, -3.0)),
            row(rollout_logprobs=(0.0, -2.0, 7.0), policy_logprobs=(0.0, -4.0, -1.0), mask=(False, True, True)),
            row(rollout_logprobs=(-1.0,) * 3, policy_logprobs=(-1.0,) * 3, policy_version=10**400),
            row(rollout_logprobs=(math.nan,) * 3, policy_logprobs=(-1.0,) * 3),
        ]
    )
    assert pairs.diff.tolist() == [-0.5, 0.0, -2.0]
    assert pairs.staleness.tolist() == [1, 0, -1]
    assert pairs.position.tolist() == [0, 1, 1]


def test_of_many_trajectories_some_of_all_steps_are_read(monkeypatch):
    monkeypatch.setattr("rl_metrics.doctor.mismatch.MAX_TOKENS", 200)
    run = MismatchedRun(steps=64, trajectories=4, tokens=4)
    pairs = read_pairs(run.rows())
    assert len(pairs) <= 200
    assert pairs.step.min() <= 2
    assert pairs.step.max() >= 60
