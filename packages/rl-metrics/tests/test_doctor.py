import json
import os

import msgspec
import pytest
from mismatched_tokens import MismatchedRun

from rl_metrics.cli import main
from rl_metrics.commands.doctor import show
from rl_metrics.doctor.diagnosing import add_health, diagnose
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, DoctorReport
from rl_metrics.doctor.hang import describe_report, diagnose_hang
from rl_metrics.doctor.mismatch_by_metrics import diagnose_metrics
from rl_metrics.doctor.mismatch_causes import Facts, facts_of
from rl_metrics.hang import HangReport
from rl_metrics.health.finding import Evidence, Finding, Verdict
from rl_metrics.run_files.rollout_log import RolloutLog
from rl_metrics.run_files.run_record import open_run

STACK = 'thread main:\n  File "/a/loop.py", line 3 in run\n    go()\n  File "/a/socket.py", line 12 in recv\n'
HANG = {
    "format": "rl-hang-2",
    "at": "2026-01-01T00:00:00",
    "run": "runs/x",
    "no_progress_s": 700.0,
    "last_progress": "step 12",
    "causes": ["engine 1 does not answer (for 650 s)"],
    "queue": {"rows": 6.0},
    "roles": [
        {"name": "learner", "state": "serving", "is_answering": True, "doing": "waits for the next order, for 700 s",
         "counts": {"steps": 12}},
        {"name": "engine 1", "state": "serving", "since_s": 650.0, "is_answering": False, "stack": STACK},
    ],
}  # fmt: skip


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def started(folder, *events, last=100.0):
    write_lines(folder / "metrics.jsonl", [{"step": step, "time": last - 10 + step} for step in range(1, 11)])
    write_lines(folder / "events.jsonl", [{"time": 1.0, "event": "run_started"}, *events])
    return open_run(folder)


def write_rollouts(folder, **options):
    rows = list(MismatchedRun(**options).rows())
    log = RolloutLog(folder / "rollouts.jsonl", clock=lambda: 5.0)
    for step in sorted({row.step for row in rows}):
        log.write([row for row in rows if row.step == step])
    log.close()


def test_a_hang_is_told_as_its_report_has_it():
    diagnosis = describe_report(msgspec.convert(HANG, HangReport))
    assert (diagnosis.kind, diagnosis.what) == ("hang", "The run hangs: no progress for 700 s.")
    assert diagnosis.evidence[0].text == f"no progress for 700 s, since: step 12; {HANG['causes'][0]}"
    (cause,) = diagnosis.causes
    assert (cause.name, cause.title) == ("silent_role", HANG["causes"][0])
    assert diagnosis.details == (
        *("engine 1: serving, does not answer, for 650 s", "  recv (socket.py:12)", "  run (loop.py:3)"),
        *("learner: serving", "  waits for the next order, for 700 s", "  steps 12"),
    )


def test_a_hang_in_which_all_roles_answer_has_a_cause():
    (cause,) = describe_report(HangReport(at="", run="", no_progress_s=0.0)).causes
    assert (cause.name, cause.title) == ("hang", "all roles answer, and none makes progress")


@pytest.mark.parametrize("hostile", [None, 7, "x", [], [None], {"a": []}, 10**400, True, float("nan")])
@pytest.mark.parametrize("key", ["no_progress_s", "last_progress", "causes", "queue", "roles"])
def test_a_hostile_report_is_judged_or_left_out(key, hostile, tmp_path):
    parts = ("name", "state", "since_s", "doing", "stack", "counts", "is_answering")
    roles = [{**HANG, "roles": [{**HANG["roles"][1], part: hostile}]} for part in parts]
    for report in ({**HANG, key: hostile}, *roles):
        (tmp_path / "hang.json").write_text(json.dumps(report))
        found = diagnose_hang(started(tmp_path))
        assert found.causes[0].name in ("silent_role", "hang", "killed")


def test_a_report_from_before_the_run_went_on_is_old(tmp_path):
    (tmp_path / "hang.json").write_text(json.dumps(HANG))
    os.utime(tmp_path / "hang.json", (50.0, 50.0))
    run = started(tmp_path, {"time": 99.0, "event": "run_finished"})
    assert diagnose_hang(run).text == "the run ended by itself"
    os.utime(tmp_path / "hang.json", (300.0, 300.0))
    failed = {"time": 310.0, "event": "run_failed", "error": "HangError: nothing happened"}
    for events in ((), (failed,)):
        found = diagnose_hang(started(tmp_path, *events))
        assert found.what == "The run hangs: no progress for 700 s."
    resumed = started(tmp_path, failed, {"time": 320.0, "event": "run_resumed"})
    assert diagnose_hang(resumed).causes[0].name == "killed"


@pytest.mark.parametrize(
    ("lock", "now", "expected"),
    [
        ("123", 130.0, "right"),
        ("123", 5_000.0, "silent_process"),
        ("77", 130.0, "killed"),
        ("x" * 50, 130.0, "killed"),
        (None, 130.0, "killed"),
    ],
)
def test_a_run_without_an_end(tmp_path, monkeypatch, lock, now, expected):
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr("rl_metrics.doctor.hang.is_running", lambda pid: pid == 123)
    if lock is not None:
        (tmp_path / ".lock").write_text(lock)
    found = diagnose_hang(started(tmp_path))
    if isinstance(found, Diagnosis):
        assert found.causes[0].name == expected
        assert "its last step is 10" in found.evidence[0].text
    else:
        assert found.state == expected


def test_a_run_that_failed_says_why(tmp_path):
    failed = {"time": 99.0, "event": "run_failed", "error": "WeightProofError: tensor a differs", "step": 10}
    run = started(tmp_path, failed)
    found = diagnose_hang(run)
    assert (found.kind, found.causes[0].name) == ("stopped", "WeightProofError")
    assert facts_of(run).failed_proofs == (
        "the proof of a weight update failed 1 times: WeightProofError: tensor a differs",
    )
    assert [cause.name for cause in diagnose(run).diagnoses[1].causes] == ["stale_weights"]


def test_settings_of_another_shape_say_nothing(tmp_path):
    run = started(tmp_path)
    (tmp_path / "settings.toml").write_text(
        'vllm = 3\nrollout = {top_p = "x", top_k = nan}\noptimizer = {dtype = [1]}\n'
    )
    assert facts_of(open_run(tmp_path)) == facts_of(run)
    (tmp_path / "settings.toml").write_text(
        "[rollout]\ntop_p = 0.9\n[vllm]\ndtype = 'bfloat16'\n[parallel]\nexpert = 2\n"
    )
    facts = facts_of(open_run(tmp_path))
    suspects = ("the policy is a mixture, and the learner does not replay the engine's experts",)
    assert (facts.cuts, facts.engine_dtype, facts.suspects) == (("rollout.top_p = 0.9",), "bfloat16", suspects)
    (tmp_path / "settings.toml").write_text("[rollout]\ntop_p = 1.0\ntop_k = 0\nmin_p = 0\ntemperature = 0.8\n")
    facts = facts_of(open_run(tmp_path))
    said = "rollout.temperature is 0.8: engine and learner must both apply it"
    assert (facts.cuts, facts.suspects) == ((), (said,))


@pytest.mark.parametrize(("unknown", "replays"), [((0.0, 0.004), True), ((0.0, 0.3), False)])
def test_a_mixture_is_suspected_unless_the_learner_replays_its_experts(tmp_path, unknown, replays):
    metrics(tmp_path, [{"router/unknown_share": share} for share in unknown])
    assert bool(facts_of(open_run(tmp_path)).suspects) is not replays


@pytest.mark.parametrize(
    ("canary", "dtype", "failed"),
    [
        (0.2, "bfloat16", ()),
        (0.5, "bfloat16", ("weights/canary_max_diff reached 0.5 nats; up to 0.3 is normal",)),
        (0.2, "float32", ("weights/canary_max_diff reached 0.2 nats; up to 0.001 is normal",)),
    ],
)
def test_a_canary_that_differs_is_a_failed_proof(tmp_path, canary, dtype, failed):
    metrics(tmp_path, [{"weights/canary_max_diff": value} for value in (0.0, canary)])
    (tmp_path / "settings.toml").write_text(f"[vllm]\ndtype = '{dtype}'\n[optimizer]\ndtype = 'float32'\n")
    assert facts_of(open_run(tmp_path)).failed_proofs == failed


def metrics(tmp_path, rows):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "time": step, **row} for step, row in enumerate(rows, 1)])
    return open_run(tmp_path).history


def test_without_tokens_metrics_tell_what_they_can(tmp_path):
    cut = [{"rollout_corr/kl": 0.1, "rollout_corr/k3_kl": 0.006, "training/rollout_probs_diff_mean": 0.03}] * 10
    found = diagnose_metrics(metrics(tmp_path, cut), Facts())
    assert [cause.name for cause in found.causes] == ["truncation"]
    assert "set metrics.log_rollouts" in found.evidence[-1].text
    grows = [{"training/rollout_probs_diff_mean": 0.002 * step} for step in range(20)]
    assert diagnose_metrics(metrics(tmp_path, grows), Facts()).causes[0].name == "stale_weights"
    [proven] = diagnose_metrics(metrics(tmp_path, grows), Facts(failed_proofs=("1.7 nats",))).causes
    assert (proven.name, len(proven.evidence), len(proven.advice)) == ("stale_weights", 1, 2)
    old = [{**row, "training/staleness/mean": 3.0} for row in grows]
    assert diagnose_metrics(metrics(tmp_path, old), Facts()).causes[0].name == "stale_rollouts"
    right = [{"training/rollout_probs_diff_mean": 0.002, "rollout_corr/k3_kl": 0.001}] * 10
    assert diagnose_metrics(metrics(tmp_path, right), Facts()).state == "right"
    assert diagnose_metrics(metrics(tmp_path, [{"actor/entropy": 1.0}]), Facts()).state == "unknown"


def test_the_command_names_the_first_cause_on_top(tmp_path, capsys):
    started(tmp_path, {"time": 99.0, "event": "run_finished"})
    write_rollouts(tmp_path, steps=12, tokens=6, top_p=0.9)
    assert main(["doctor", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("first cause: sampling truncation")
    assert any(line.startswith("memory: unknown") for line in lines)
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ailments"][0]["causes"][0]["name"] == "truncation"


def test_the_command_finds_nothing_in_a_healthy_run(tmp_path, capsys):
    started(tmp_path, {"time": 99.0, "event": "run_finished"})
    write_rollouts(tmp_path, steps=12, tokens=6)
    assert main(["doctor", str(tmp_path)]) == 0
    assert "no problem found" in capsys.readouterr().out


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert main(["doctor", str(tmp_path)]) == 2
    assert "must be the folder of a run" in capsys.readouterr().err


def test_torn_and_hostile_files_are_read_for_what_they_have(tmp_path, capsys):
    started(tmp_path, {"time": 99.0, "event": "run_finished"})
    write_rollouts(tmp_path, steps=12, tokens=6)
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(
            b'{"step":13,"index":0,"prompt_uid":"p","prompt":"<script>","resp\n[1]\n\xff\n{"step":"x"}\n{"step":14,"ind'
        )
    hang = {"at": "", "run": "", "no_progress_s": 1, "causes": ["\x1b[31mred"], "roles": [{"name": "<script>\x1b[2J"}]}
    (tmp_path / "hang.json").write_text(json.dumps(hang))
    (tmp_path / "settings.toml").write_text("[rollout")
    assert main(["doctor", str(tmp_path)]) in (0, 1)
    assert "\x1b" not in capsys.readouterr().out


# -- findings of the health checks


def zero_rewards(folder, **more):
    rows = [{"step": step, "time": step, "critic/score/mean": 0.0, **more} for step in range(1, 31)]
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(
        folder / "events.jsonl", [{"time": 1.0, "event": "run_started"}, {"time": 2.0, "event": "run_finished"}]
    )
    return open_run(folder)


def test_what_health_finds_is_a_diagnosis_with_its_causes_and_their_advice(tmp_path):
    [diagnosis] = diagnose(zero_rewards(tmp_path)).diagnoses
    assert (diagnosis.kind, diagnosis.what) == ("health", "Every reward is 0.")
    assert diagnosis.evidence[-1].text == "since step 1 (rule reward_zero)"
    first, second = diagnosis.causes
    assert first.name == "the_reward_function_does_not_find_answers_or_compares_them_with_the_wrong_field"
    assert [advice.partition(" ")[0] for advice in first.advice] == ["call"]
    assert second.name == "the_prompts_are_too_hard_for_this_policy"
    assert [advice.partition(" ")[0] for advice in second.advice] == ["start"]
    flat = "follows from it: The reward has not risen since the start. (since step 1, rule reward_flat)"
    assert flat in diagnosis.details


def test_findings_that_nothing_explains_are_diagnoses_of_their_own(tmp_path):
    slow = {"timing_s/step": 10.0, "timing_s/reward_wait": 6.0, "response_length/clip_ratio": 0.5}
    cut, waits = diagnose(zero_rewards(tmp_path, **slow)).diagnoses
    assert cut.what == "Many responses are cut at the length limit."
    assert any("Every reward is 0" in line for line in cut.details)
    assert (waits.what, waits.details) == ("The reward function takes a large part of the step.", ())
    assert waits.causes[0].name == "slow_reward"


def test_a_mismatch_is_not_told_twice(tmp_path):
    run = zero_rewards(tmp_path, **{"training/rollout_probs_diff_mean": 0.2, "rollout_corr/k3_kl": 0.5})
    assert [one.kind for one in diagnose(run).diagnoses] == ["mismatch", "health"]
    rows = [{"step": step, "time": step, "rollout_corr/k3_kl": 0.5, "rollout_corr/kl": 0.5} for step in range(1, 31)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert [one.kind for one in diagnose(open_run(tmp_path)).diagnoses] == ["mismatch"]


def finding(rule, *because, causes=("why",), advice=("do",)):
    evidence = (Evidence(metric="m", text=f"{rule} is high"),)
    told = {"side": "task", "severity": "warning", "what": f"{rule}!", "since_step": 3, "evidence": evidence}
    return Finding(rule=rule, causes=causes, advice=advice, because=because, **told)


def judged(monkeypatch, *findings, known=()):
    verdict = Verdict(status="warning", step=9, checks=(), findings=findings)
    monkeypatch.setattr("rl_metrics.doctor.diagnosing.judge_run", lambda run: verdict)
    diagnoses, no_findings = add_health(None, known=known)
    assert no_findings == ()
    effects = [[line.removeprefix("follows from it: ").partition("!")[0] for line in one.details] for one in diagnoses]
    return [(one.what, effect) for one, effect in zip(diagnoses, effects, strict=True)]


def test_what_follows_from_a_finding_is_a_line_of_its_diagnosis(monkeypatch):
    chain = [finding("a"), finding("b", "a"), finding("c"), finding("d", "b", "c"), finding("e", "c")]
    assert judged(monkeypatch, *chain) == [("a!", ["b", "d"]), ("c!", ["e"])]
    circle = [finding("a", "b"), finding("b", "a"), finding("c", "gone")]
    assert judged(monkeypatch, *circle) == [("a!", ["b"]), ("c!", [])]


def test_a_known_diagnosis_covers_its_rules_and_has_what_follows_from_them(monkeypatch):
    apart = Diagnosis(kind="mismatch", what="apart")
    found = [finding("off_policy"), finding("a", "off_policy"), finding("memory"), finding("b", "memory")]
    assert judged(monkeypatch, *found, known=[apart]) == [("apart", ["a"]), ("memory!", ["b"])]
    assert judged(monkeypatch, found[0], known=[apart]) == [("apart", [])]
    assert judged(monkeypatch, *found[:2]) == [("off_policy!", ["a"])]


def test_each_cause_has_its_own_advice(monkeypatch):
    told = finding("a", causes=("one", "two: of it", "three"), advice=("do this", "do that", "do this"))
    verdict = Verdict(status="warning", step=9, checks=(), findings=(told,))
    monkeypatch.setattr("rl_metrics.doctor.diagnosing.judge_run", lambda run: verdict)
    [diagnosis], _ = add_health(None, known=())
    assert [(cause.name, cause.advice) for cause in diagnosis.causes] == [
        ("one", ("do this",)),
        ("two", ("do that",)),
        ("three", ("do this",)),
    ]
    assert [evidence.text for evidence in diagnosis.evidence] == ["a is high", "since step 3 (rule a)"]


def test_no_line_of_a_diagnosis_is_shown_twice(capsys):
    grows, waits = (Evidence(metric="m", text=text) for text in ("it grows", "it waits"))
    causes = [
        Cause(name="one", title="one", evidence=(grows, waits, waits), advice=("do this", "do this")),
        Cause(name="two", title="two", share=0.5, evidence=(waits,), advice=("do this", "do that")),
    ]
    sick = Diagnosis(kind="memory", what="sick", evidence=(grows, grows), causes=tuple(causes))
    show(DoctorReport(run="a", diagnoses=(sick, sick)))
    told = ["", "memory: sick", "  it grows", "  1. one", "     because it waits", "     try: do this"]
    told += ["  2. two (50 %)", "     try: do that"]
    assert capsys.readouterr().out.splitlines() == ["run a", "first cause: one", *told, *told]


def test_few_steps_are_not_judged(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "time": 1.0, "critic/score/mean": 0.0}])
    assert "health: unknown: too few steps to judge" in shown(tmp_path)


def shown(folder):
    diagnosis = diagnose(open_run(folder))
    return [f"{reading.kind}: {reading.state}: {reading.text}" for reading in diagnosis.no_findings]


def test_a_run_that_says_nothing_is_not_called_well(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    assert main(["doctor", str(tmp_path)]) == 2
    assert "nothing could be checked" in capsys.readouterr().out
