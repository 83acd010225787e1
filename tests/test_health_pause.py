"""A health pause writes a checkpoint and exits with 3; the resumed run ends like an unpaused one."""

import json
from pathlib import Path

import pytest
from async_runs import train_async_here
from run_equality import assert_equal_runs
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_metrics.health import Verdict
from rl_metrics.run_files.events import read_events

SICK = {
    "health__every": 2,
    "health__thresholds": '{ "weights_proof.canary_max" = -1 }',
    "health__pause_on": '["weights_proof"]',
}
"""The canary's difference is always above this, so that the finding exists from the first update."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_tiny_run(tmp_path_factory.mktemp("uninterrupted"))
    assert train_here(run) == 0
    return run


def summary(run: TinyRun) -> dict[str, object]:
    return json.loads((run.run_folder / "summary.json").read_text())


def events(run: TinyRun, *names: str) -> list[dict[str, object]]:
    return [event for event in read_events(run.run_folder / "events.jsonl") if event["event"] in names]


def test_the_synchronous_trainer_pauses_and_goes_on(
    uninterrupted: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_tiny_run(uninterrupted, tmp_path / "run")
    assert train_here(run, **SICK) == 3
    said = capsys.readouterr().out
    assert "health: critical: A weight proof failed" in said
    assert "paused after step 2 by health.pause_on: weights_proof; continue with --resume" in said
    assert (summary(run)["status"], summary(run)["paused_by"]) == ("paused", "health.pause_on: weights_proof")
    assert sorted(path.name for path in (run.run_folder / "checkpoints").iterdir()) == ["step_2"]
    (stopped,) = events(run, "run_stopped")
    assert (stopped["step"], stopped["paused_by"]) == (2, "health.pause_on: weights_proof")
    assert train_here(run, "--resume", **SICK) == 0, "the last step, 4, does not pause"
    assert len(events(run, "health_finding")) == 1
    verdict = Verdict.from_json(json.loads((run.run_folder / "health.json").read_text()))
    assert (verdict.step, [finding.rule for finding in verdict.findings]) == (4, ["weights_proof"])
    assert_equal_runs(run, uninterrupted)


def test_a_resumed_run_may_have_other_rules(uninterrupted: TinyRun, tmp_path: Path) -> None:
    run = copy_tiny_run(uninterrupted, tmp_path / "run")
    assert train_here(run, **SICK) == 3
    assert train_here(run, "--resume") == 0
    assert [(event["rule"], event["step"]) for event in events(run, "health_finding_over")] == [("weights_proof", 4)]
    assert_equal_runs(run, uninterrupted)


def test_the_asynchronous_trainer_pauses_and_goes_on(uninterrupted: TinyRun, tmp_path: Path) -> None:
    run = copy_tiny_run(uninterrupted, tmp_path / "run")
    assert train_async_here(run, trainer__steps=6, **SICK) == 3
    step = summary(run)["steps"]
    assert summary(run)["status"] == "paused"
    assert 2 <= step < 6
    assert (run.run_folder / "checkpoints" / f"step_{step}").is_dir()
    assert train_async_here(run, "--resume", trainer__steps=6, health__pause_on="[]") == 0
    assert summary(run)["status"] == "finished"
    assert len(events(run, "run_finished")) == 1


def test_a_healthy_tiny_run_says_nothing(uninterrupted: TinyRun) -> None:
    assert events(uninterrupted, "health_finding") == []
    assert json.loads((uninterrupted.run_folder / "health.json").read_text())["step"] == 4
