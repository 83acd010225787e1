import json
import os
import subprocess
import sys

import pytest
import wandb
from counting_proxy import counting_proxy
from tracker_files import wandb_attempts, wandb_history, wandb_records

from rl_core.errors import DataError, MissingExtraError, NotReadyError, SettingsError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.servers import COLUMNS
from rl_metrics.trackers.tracker import BackgroundTracker
from rl_metrics.trackers.wandb import WandbTracker

RUN = """
import sys
from pathlib import Path
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.wandb import WandbTracker
tracker = WandbTracker(Path(sys.argv[1]), project="p")
sample = GenerationSample(prompt_uid="p", input="a", output="b", policy_version=(0, 0), source="s")
tracker.log(1, {"a": 1.0})
tracker.log_generations(1, "val/generations", [sample])
tracker.close()
"""


@pytest.fixture(scope="module", autouse=True)
def service():
    """Stop wandb's service process after the module."""
    yield
    wandb.teardown()


def start(folder, **changed):
    return WandbTracker(folder, **({"project": "rl", "mode": "offline"} | changed))


def test_rows_have_the_trainers_steps_and_none_is_dropped(tmp_path):
    tracker = start(tmp_path, name="a run", config={"trainer": {"steps": 3}})
    for step in (0, 1, 2, 1, 2):  # steps 1 and 2 repeat after a resume
        tracker.log(step, {"actor/entropy": step / 4})
    tracker.close()
    tracker.close()
    (attempt,) = wandb_attempts(tmp_path)
    rows = wandb_history(attempt)
    assert [(row["training/global_step"], row["actor/entropy"]) for row in rows] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
        (1, 0.25),
        (2, 0.5),
    ]
    run = next(record.run for record in wandb_records(attempt) if record.HasField("run"))
    assert (run.project, run.display_name) == ("rl", "a run")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["trainer"] == {"steps": 3}
    metrics = [record.metric for record in wandb_records(attempt) if record.HasField("metric")]
    assert ("*", "training/global_step") in [(metric.glob_name, metric.step_metric) for metric in metrics]


def test_late_metrics_stand_at_their_own_step(tmp_path):
    tracker = start(tmp_path)
    tracker.log(2, {"a": 1.0})
    tracker.log_late(1, {"val-core/a/acc/mean@1": 0.5})
    tracker.log(3, {"a": 2.0})
    tracker.close()
    rows = wandb_history(wandb_attempts(tmp_path)[0])
    assert [(row["training/global_step"], row.get("a"), row.get("val-core/a/acc/mean@1")) for row in rows] == [
        (2, 1.0, None),
        (1, None, 0.5),
        (3, 2.0, None),
    ]


def test_a_resumed_run_is_the_same_run(tmp_path):
    for step in (1, 2):
        tracker = start(tmp_path)
        tracker.log(step, {"a": 1.0})
        tracker.close()
    both = wandb_attempts(tmp_path)
    assert len(both) == 2
    run_id = (tmp_path / "wandb_run_id").read_text()
    assert {record.run.run_id for attempt in both for record in wandb_records(attempt) if record.HasField("run")} == {
        run_id
    }
    assert [row["training/global_step"] for attempt in both for row in wandb_history(attempt)] == [1, 2]


def test_another_folder_is_another_run(tmp_path):
    for name in ("a", "b"):
        start(tmp_path / name, mode="disabled").close()
    assert (tmp_path / "a" / "wandb_run_id").read_text() != (tmp_path / "b" / "wandb_run_id").read_text()


def test_generations_are_a_table_at_their_step(tmp_path):
    samples = [
        GenerationSample(
            prompt_uid="p1",
            input="1+1",
            output="<b>\n2",
            score=1.0,
            ground_truth=["2"],
            policy_version=(3, 4),
            source="rollouter",
            components={"acc": 1.0},
        ),
        GenerationSample(
            prompt_uid="p2", input="2+2", output="", policy_version=(4, 4), source="learner", failure="timeout"
        ),
    ]
    tracker = BackgroundTracker(start(tmp_path), name="wandb")  # as in trainers
    tracker.log(10, {"a": 1.0})
    tracker.log_generations(8, "val/generations", samples)
    tracker.close()
    (attempt,) = wandb_attempts(tmp_path)
    row = wandb_history(attempt)[-1]
    assert row["training/global_step"] == 8
    assert row["val/generations|_type"] == "table-file"
    table = json.loads((attempt / "files" / row["val/generations|path"]).read_text())
    assert table["columns"] == list(COLUMNS)
    assert table["data"] == [
        [8, "p1", "1+1", "<b>\n2", 1.0, '["2"]', 3, 4, "rollouter", None, '{"acc": 1.0}'],
        [8, "p2", "2+2", "", None, None, 4, 4, "learner", "timeout", "{}"],
    ]


def test_histograms_stand_at_their_step(tmp_path):
    histogram = Histogram()
    histogram.add([0.0, 0.0, 1.0])
    tracker = start(tmp_path)
    tracker.log_histograms(5, {"distribution/reward": histogram, "distribution/advantage": Histogram()})
    tracker.close()
    (row,) = wandb_history(wandb_attempts(tmp_path)[0])
    assert row["training/global_step"] == 5
    assert row["distribution/reward|_type"] == "histogram"
    counts, bins = row["distribution/reward|values"], row["distribution/reward|bins"]
    assert (counts[0], counts[-1], sum(counts)) == (2, 1, 3)
    assert (bins[0], bins[-1], len(bins)) == (0.0, 1.0, len(counts) + 1)
    assert not any("advantage" in key for key in row)


def test_offline_nothing_reaches_the_network(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment |= {"WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40}
    words = [sys.executable, "-c", RUN, str(tmp_path)]
    with counting_proxy() as (proxies, callers):
        result = subprocess.run(
            words, env=environment | proxies, capture_output=True, text=True, check=False, timeout=120
        )
    assert result.returncode == 0, result.stderr
    assert callers == []
    assert {path.name for path in tmp_path.iterdir()} == {"wandb", "wandb_run_id"}
    assert len(wandb_history(wandb_attempts(tmp_path)[0])) == 2


def test_the_mode_is_the_arguments_then_the_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    start(tmp_path).close()
    assert len(wandb_attempts(tmp_path)) == 1
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(SettingsError, match="online, offline, disabled; found 'sometimes'"):
        start(tmp_path, mode=None)


def test_a_broken_id_is_refused(tmp_path):
    (tmp_path / "wandb_run_id").write_bytes(b"../x\xff")
    with pytest.raises(DataError, match="must contain the id"):
        start(tmp_path)


def test_what_wandb_refuses_is_said_with_a_way_out(tmp_path, monkeypatch):
    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(SettingsError, match=r"No API key configured\. Run `wandb login`, or choose mode offline"):
        start(tmp_path, mode="online")


def test_after_close_it_says_so(tmp_path):
    tracker = start(tmp_path, mode="disabled")
    tracker.close()
    with pytest.raises(NotReadyError, match="is finished"):
        tracker.log(1, {})


def test_without_wandb_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-metrics\[wandb\]"):
        start(tmp_path)
