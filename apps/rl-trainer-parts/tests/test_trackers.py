"""The trackers that the settings select."""

import json

import pytest

from rl_metrics.trackers.console import ConsoleTracker
from rl_trainer_parts.reporting.trackers import make_trackers
from rl_trainer_parts.settings.schema import Settings


def settings_of(tmp_path, **metrics):
    return Settings(
        policy={"path": tmp_path}, prompts={"train": tmp_path / "train.jsonl"}, run={"name": "r"}, metrics=metrics
    )


def test_mlflow_gets_the_settings_the_metrics_and_how_the_run_ended(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/shared.db"
    settings = settings_of(tmp_path, trackers=("mlflow",), mlflow_uri=uri, mlflow_experiment="sums")
    trackers = make_trackers(settings, tmp_path / "run", ConsoleTracker(), ending=lambda: "failed")
    assert trackers.active == ("report", "jsonl", "console", "mlflow")
    trackers.log(1, {"actor/entropy": 0.5})
    trackers.close()
    run = MlflowClient(tracking_uri=uri).get_run((tmp_path / "run" / "mlflow_run_id").read_text())
    assert (run.info.run_name, run.info.status) == ("r", "FAILED")
    assert run.data.metrics == {"actor/entropy": 0.5}
    assert run.data.params["metrics.mlflow_experiment"] == "sums"
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["actor/entropy"] == 0.5


def test_without_any_they_are_the_file_and_the_console(tmp_path):
    trackers = make_trackers(settings_of(tmp_path), tmp_path / "run", ConsoleTracker())
    assert trackers.active == ("report", "jsonl", "console")
    trackers.close()


def test_the_report_can_be_left_out(tmp_path):
    trackers = make_trackers(settings_of(tmp_path, report=False), tmp_path / "run", ConsoleTracker())
    assert trackers.active == ("jsonl", "console")
    trackers.close()


def test_another_tracker_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'tensorboard', 'wandb' or 'mlflow'"):
        settings_of(tmp_path, trackers=("neptune",))
