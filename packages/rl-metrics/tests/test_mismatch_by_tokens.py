import math
from dataclasses import replace

import pytest
from mismatched_tokens import MismatchedRun

from rl_metrics.doctor.diagnosis import Ailment, Reading
from rl_metrics.doctor.facts import Facts
from rl_metrics.doctor.mismatch_by_tokens import judge_tokens
from rl_metrics.doctor.token_pairs import read_pairs
from rl_metrics.run_files.rollout_log import RolloutRow

EXACT = Facts(engine_dtype="float32", learner_dtype="float32")
ROUNDED = Facts(engine_dtype="bfloat16", learner_dtype="float32")
SHORT = {"steps": 12, "tokens": 6}
LONG = {"steps": 30, "tokens": 24}
pytestmark = pytest.mark.one_python("its work is numpy's")


def judge(facts, **options):
    return judge_tokens(read_pairs(MismatchedRun(**options).rows()), facts)


def names(found):
    assert isinstance(found, Ailment), found
    return [cause.name for cause in found.causes]


@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("seed", [0, 1])
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
        ("temperature", EXACT, {"temperature": 0.6}),
        ("temperature", EXACT, {"temperature": 1.3}),
        ("precision", EXACT, {"is_bfloat16": True}),
        ("routing", EXACT, {"swapped": 0.03}),
        ("routing", ROUNDED, {"swapped": 0.06, "noise": 0.01}),
        ("other_computation", EXACT, {"wrong": 0.3}),
    ],
)
def test_each_cause_comes_first(expected, facts, options, seed, size):
    assert names(judge(facts, seed=seed, **options, **size))[0] == expected


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("expected", "facts", "options"),
    [
        ({"stale_weights", "truncation"}, Facts(top_p=0.9), {"is_frozen": True, "learning_rate": 0.1, "top_p": 0.9}),
        ({"stale_weights", "truncation"}, Facts(top_p=0.9), {"is_frozen": True, "top_p": 0.9}),
        ({"temperature", "truncation"}, Facts(top_p=0.9), {"temperature": 0.8, "top_p": 0.9}),
        ({"template", "truncation"}, EXACT, {"template": 2.0, "top_p": 0.9}),
        ({"template", "stale_weights"}, EXACT, {"template": 2.0, "is_frozen": True, "learning_rate": 0.1}),
        ({"temperature", "stale_weights"}, EXACT, {"temperature": 0.8, "is_frozen": True, "learning_rate": 0.1}),
    ],
)
def test_two_causes_are_both_named(expected, facts, options, seed):
    assert set(names(judge(facts, seed=seed, **options, **LONG))[:2]) == expected


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
    assert isinstance(found, Reading), found
    assert found.state == "right"


def test_what_is_said_has_figures():
    found = judge(Facts(top_p=0.9), top_p=0.9, **SHORT)
    (cause,) = found.causes
    assert cause.share == pytest.approx(1.0)
    assert cause.evidence[-1].text == "rollout.top_p = 0.9"
    assert {name for name, _ in found.against} >= {"temperature", "template", "stale_weights"}
    assert found.evidence[0].value == pytest.approx(0.09, abs=0.02)


def test_a_temperature_is_measured():
    found = judge(Facts(temperature=0.8), temperature=0.8, **LONG)
    text, said = (evidence.text for evidence in found.causes[0].evidence)
    ratio = float(text.partition("about ")[2].partition(",")[0])
    assert ratio == pytest.approx(0.8, abs=0.05)
    assert said == "rollout.temperature is 0.8, and one side does not apply it"


@pytest.mark.parametrize("facts", [Facts(proof_failures=2, proof_error="tensor a"), Facts(canary=0.5)])
@pytest.mark.parametrize("steps", [0, 12])
def test_a_failed_proof_names_stale_weights_whatever_the_tokens_say(facts, steps):
    assert names(judge(facts, steps=steps, tokens=6))[0] == "stale_weights"


@pytest.mark.parametrize(
    "facts",
    [
        Facts(engine_dtype="float32", learner_dtype="float32", canary=1.7),
        Facts(engine_dtype="float32", learner_dtype="float32", proof_failures=1),
        Facts(canary=1.7),
    ],
)
def test_what_a_failed_proof_explains_is_its_share_and_no_other_computation(facts):
    found = judge(facts, wrong=0.3, **SHORT)
    (cause,) = found.causes
    assert cause.name == "stale_weights"
    assert cause.share == pytest.approx(1.0)
    assert len(cause.evidence) == 2
    assert len(cause.advice) == len(set(cause.advice)) == 2


def test_a_failed_proof_leaves_other_causes_their_share():
    facts = Facts(engine_dtype="float32", learner_dtype="float32", top_p=0.9, canary=1.7)
    found = judge(facts, top_p=0.9, **LONG)
    assert names(found) == ["stale_weights", "truncation"]
    assert found.causes[1].share == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("first", "said"),
    [(1, "present from the first step on"), (4, "present from step 4 on, the first recorded one")],
)
def test_no_more_is_said_of_first_steps_than_is_recorded(first, said):
    rows = [replace(row, step=row.step + first - 1) for row in MismatchedRun(wrong=0.3, **SHORT).rows()]
    cause = judge_tokens(read_pairs(rows), EXACT).causes[0]
    assert cause.name == "other_computation"
    assert cause.evidence[0].text.endswith(said)
    assert "first step" not in cause.title


def test_a_mixture_of_experts_is_asked_for():
    dense, mixture = (judge(Facts(is_mixture=known), swapped=0.05, **SHORT).causes[0] for known in (None, True))
    assert "does not record whether the policy is a mixture" in dense.evidence[-1].text
    assert len(mixture.evidence) == 1


def test_a_learner_that_replays_has_the_engines_experts():
    found = judge(Facts(is_mixture=True, replays=True), swapped=0.05, **SHORT)
    assert "routing" not in [cause.name for cause in found.causes]
    assert any("the learner replays the engine's experts" in str(said) for said in found.against)


def test_too_few_tokens_are_unknown():
    found = judge(EXACT, steps=1, trajectories=2, tokens=5, wrong=1.0)
    assert isinstance(found, Reading)
    assert found.state == "unknown"


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
        ]
    )
    assert pairs.diff.tolist() == [-0.5, 0.0, -2.0]
    assert pairs.staleness.tolist() == [1, 0, -1]
    assert pairs.position.tolist() == [0, 1, 1]
    assert pairs.trajectory.tolist() == [0, 0, 2]


def test_of_many_trajectories_some_of_all_steps_are_read():
    run = MismatchedRun(steps=64, trajectories=4, tokens=4)
    pairs = read_pairs(run.rows(), max_tokens=200)
    assert len(pairs) <= 200
    assert pairs.step.min() <= 2
    assert pairs.step.max() >= 60
