"""Runs keep the checkpoint of their best validation, and end when validation says so."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import train_async_here
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics

ACCURACY = "val-core/arithmetic/acc/mean@1"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


def validate_as(patch: pytest.MonkeyPatch, module: str, values: list[float]) -> None:
    """Let validations and tests, in turn, report these accuracies instead of their own."""
    left: Iterator[float] = iter(values)
    patch.setattr(f"{module}.summarize_answers", lambda answers: {ACCURACY: next(left)})


def kept(run: TinyRun) -> list[str]:
    return sorted(path.name for path in (run.run_folder / "checkpoints").iterdir())


def summary(run: TinyRun) -> dict[str, Any]:
    return json.loads((run.run_folder / "summary.json").read_text())


def test_a_synchronous_run_ends_when_validation_says_so_and_keeps_the_best(
    inputs: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_tiny_run(inputs, tmp_path / "run")
    settings: dict[str, Any] = {
        "trainer__steps": 9,
        "trainer__validate_every": 1,
        "trainer__checkpoint_every": 0,
        "trainer__keep_checkpoints": 1,
        "trainer__stop_when_no_better": 2,
        "trainer__target.value": 0.9,
    }
    with monkeypatch.context() as patch:
        validate_as(patch, "rl_sync_trainer.stages", [0.1, 0.1, 0.6, 0.5, 0.4, 0.45])  # step 0 has a test too
        assert train_here(run, **settings) == 0
    said = capsys.readouterr().out
    found = summary(run)
    assert (found["status"], found["steps"], found["best_step"], found["best_value"]) == ("finished", 3, 1, 0.6)
    assert "no better than its 0.6 of step 1 for 2 validations" in found["stopped_by"]
    assert (found["target"], found["target_reached"], found["test_accuracy_last"]) == (0.9, False, 0.45)
    assert found["stopped_by"] in said.replace("\n", " ")
    assert kept(run) == ["step_1", "step_3"]
    assert json.loads((run.run_folder / "health.json").read_text())["target"]["is_reached"] is False

    with monkeypatch.context() as patch:
        patch.setattr("rl_sync_trainer.training_run.make_engine", pytest.fail)
        patch.setattr("rl_sync_trainer.training_run.start_learners", pytest.fail)
        assert train_here(run, "--resume", **settings) == 0
        assert "the run has ended at step 3" in capsys.readouterr().out

    shutil.rmtree(run.run_folder / "checkpoints" / "step_3")  # as after a kill: the best is the newest too
    with monkeypatch.context() as patch:
        validate_as(patch, "rl_sync_trainer.stages", [0.2, 0.95, 0.9])
        more = settings | {"trainer__target.stop": "true"}
        assert train_here(run, "--resume", **more) == 0
    found = summary(run)
    assert (found["steps"], found["best_step"], found["target_reached_at_step"]) == (3, 3, 3)
    assert "trainer.target" in found["stopped_by"]
    assert kept(run) == ["step_3"]
    starts = run.train_words("--best", "--dry-run", run__name="next", policy__path=run.run_folder)
    from rl_sync_trainer.main import main

    assert main(starts) == 0
    assert "step_3/policy" in capsys.readouterr().out


@pytest.mark.parametrize("validate_on", ["engines", "learner"])
def test_an_asynchronous_run_keeps_exactly_the_validated_version(
    inputs: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    validate_on: str,
) -> None:
    run = copy_tiny_run(inputs, tmp_path / "run")
    settings: dict[str, Any] = {
        "trainer__steps": 30,
        "trainer__validate_every": 2,
        "trainer__checkpoint_every": 1,
        "trainer__keep_checkpoints": 1,
        "trainer__stop_when_no_better": 1,
        "schedule__validate_on": validate_on,
    }
    with monkeypatch.context() as patch:
        validate_as(patch, "rl_async_trainer.controller.validator", [0.1, 0.1, 0.6, 0.5, *[0.4] * 20])
        assert train_async_here(run, **settings) == 0
    found = summary(run)
    assert (found["status"], found["best_step"], found["best_value"]) == ("finished", 2, 0.6)
    assert 4 <= found["steps"] < 30
    assert found["test_accuracy_last"] in (0.4, 0.5)
    assert kept(run) == ["step_2", f"step_{found['steps']}"]
    rows = {row.step: row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl")}
    assert rows[2]["validation/is_exact"] == 1.0
    assert rows[2]["validation/policy_version/min"] == rows[2]["validation/policy_version/max"] == 2.0

    capsys.readouterr()
    monkeypatch.setattr("rl_async_trainer.training_run.AsyncTrainingRun._start_roles", pytest.fail)
    monkeypatch.setattr("rl_async_trainer.training_run.open_queue", pytest.fail)
    assert train_async_here(run, "--resume", **settings) == 0
    assert f"the run has ended at step {found['steps']}" in capsys.readouterr().out
