import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from counting_proxy import counting_proxy
from hypothesis import example, given
from hypothesis import strategies as st

from rl_core.errors import DataError, MissingExtraError, NotReadyError, SettingsError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.jsonl import JsonlTracker, read_metrics
from rl_metrics.trackers.mlflow import MlflowTracker, mlflow_name
from rl_metrics.trackers.servers import COLUMNS
from rl_metrics.trackers.tracker import BackgroundTracker, Fanout

pytestmark = pytest.mark.one_python("its work is MLflow's")

RUN = """
import sys
from pathlib import Path
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.trackers.mlflow import MlflowTracker
tracker = MlflowTracker(Path(sys.argv[1]), experiment="first", config={"a": 1})
sample = GenerationSample(prompt_uid="p", input="a", output="b", policy_version=(0, 0), source="s")
tracker.log(1, {"a": 1.0})
tracker.log_generations(1, "val/generations", [sample])
tracker.close()
sys.exit(",".join(name for name in ("torch", "sklearn", "flask") if name in sys.modules) or 0)
"""


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Record a whole run in a new database, in another process; return also the calls to its proxy."""
    folder = tmp_path_factory.mktemp("run")
    quiet = ("no_proxy", "do_not_track", "ci", "pytest_current_test", "mlflow_disable_telemetry")
    environment = {name: value for name, value in os.environ.items() if name.lower() not in quiet}
    words = [sys.executable, "-c", RUN, str(folder)]
    with counting_proxy() as (proxies, callers):
        result = subprocess.run(
            words, env=environment | proxies, cwd=folder, capture_output=True, text=True, check=False, timeout=240
        )
    return folder, result, callers


@pytest.fixture(scope="module")
def uri(first_run):
    """Reuse an existing database, since creating one takes seconds."""
    return f"sqlite:///{first_run[0]}/mlflow/mlflow.db"


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def run_of(uri, folder):
    return client(uri).get_run((folder / "mlflow_run_id").read_text())


def history(uri, folder, name):
    rows = client(uri).get_metric_history((folder / "mlflow_run_id").read_text(), mlflow_name(name))
    return [(row.step, row.value) for row in sorted(rows, key=lambda row: (row.timestamp, row.step))]


def artefact(uri, folder, path):
    return json.loads((Path(run_of(uri, folder).info.artifact_uri.removeprefix("file://")) / path).read_text())


def sample(**changed):
    given = {"prompt_uid": "p1", "input": "1+1", "output": "2", "policy_version": (3, 3), "source": "rollouter"}
    return GenerationSample(**(given | changed))


def test_a_local_run_reaches_no_network_and_lies_in_its_folder(first_run, uri):
    folder, result, callers = first_run
    assert (result.returncode, result.stderr) == (0, "")
    assert callers == []
    assert {path.name for path in folder.iterdir()} == {"mlflow", "mlflow_run_id"}
    assert {path.name for path in (folder / "mlflow").iterdir()} == {"mlflow.db", "mlartifacts"}
    assert history(uri, folder, "a") == [(1, 1.0)]
    assert run_of(uri, folder).info.status == "FINISHED"


def test_metrics_stand_at_the_trainers_steps(tmp_path, uri):
    tracker = MlflowTracker(tmp_path, experiment="steps", name="a run", uri=uri)
    tracker.log(0, {"val-core/a b/acc/mean@1": 0.25})
    tracker.log(2, {"actor/entropy": 0.5, "actor/loss": math.nan})
    tracker.log_late(1, {"actor/entropy": 0.75})
    tracker.log(3, {f"queue/{index}": float(index) for index in range(1500)})
    assert run_of(uri, tmp_path).info.status == "RUNNING"
    tracker.close()
    tracker.close()
    run = run_of(uri, tmp_path)
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert client(uri).get_experiment(run.info.experiment_id).name == "steps"
    assert sorted(history(uri, tmp_path, "actor/entropy")) == [(1, 0.75), (2, 0.5)]
    assert str(history(uri, tmp_path, "actor/loss")) == "[(2, nan)]"
    assert history(uri, tmp_path, "val-core/a b/acc/mean@1") == [(0, 0.25)]
    assert "val-core/a b/acc/mean_at_1" in run.data.metrics
    assert run.data.metrics["queue/1499"] == 1499.0


def test_a_resumed_run_is_the_same_run(tmp_path, uri):
    for step, config in ((1, {"trainer": {"steps": 1}}), (2, {"trainer": {"steps": 2, "more": [1]}, "x": {}})):
        tracker = MlflowTracker(tmp_path, experiment="resumed", uri=uri, config=config)
        assert run_of(uri, tmp_path).info.status == "RUNNING"
        tracker.log(step, {"a": float(step)})
        tracker.close()
    experiment = client(uri).get_experiment_by_name("resumed")
    (run,) = client(uri).search_runs([experiment.experiment_id])
    assert history(uri, tmp_path, "a") == [(1, 1.0), (2, 2.0)]
    assert run.data.params == {"trainer.steps": "1", "trainer.more": "[1]", "x": "{}"}
    assert artefact(uri, tmp_path, "settings.json") == config


def test_another_folder_is_another_run_of_the_experiment(tmp_path, uri):
    for name in ("a", "b"):
        MlflowTracker(tmp_path / name, experiment="two", uri=uri).close()
    runs = [run_of(uri, tmp_path / name).info for name in ("a", "b")]
    assert runs[0].run_id != runs[1].run_id
    assert runs[0].experiment_id == runs[1].experiment_id


def test_many_and_long_settings(tmp_path, uri):
    config = {f"key{index}": index for index in range(250)} | {"text": "x" * 9000, "a@{b}": None, "k" * 300: "long"}
    MlflowTracker(tmp_path, experiment="settings", uri=uri, config=config).close()
    params = run_of(uri, tmp_path).data.params
    assert len(params) == 253
    assert (params["key249"], params["text"], params["a_at_:7b:b:7d:"]) == ("249", "x" * 6000, "null")


def test_generations_are_a_table_at_their_step(tmp_path, uri):
    evil = "<script>x</script>\x1b[2J\nline"
    tracker = BackgroundTracker(MlflowTracker(tmp_path, experiment="tables", uri=uri), name="mlflow")
    tracker.log_generations(8, "val/generations", [sample(output=evil, score=1.0, components={"acc": 1.0})])
    tracker.log_generations(9, "val/generations", [sample(failure="timeout")])
    tracker.log_generations(9, "../test", [])
    tracker.close()
    assert artefact(uri, tmp_path, "generations/val/generations/00000008.json") == {
        "columns": list(COLUMNS),
        "data": [[8, "p1", "1+1", evil, 1.0, None, 3, 3, "rollouter", None, '{"acc": 1.0}']],
    }
    newest = artefact(uri, tmp_path, "generations/val/generations/00000009.json")["data"][0]
    assert (newest[0], newest[4], newest[9]) == (9, None, "timeout")
    assert json.loads(run_of(uri, tmp_path).data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "generations/val/generations/00000009.json", "type": "table"},
        {"path": "generations/:2e:./test/00000009.json", "type": "table"},
    ]
    assert artefact(uri, tmp_path, "generations/:2e:./test/00000009.json")["data"] == []


def test_distributions_are_three_quantiles(tmp_path, uri):
    histogram = Histogram()
    histogram.add([0.0] * 20 + [1.0])
    tracker = MlflowTracker(tmp_path, experiment="quantiles", uri=uri)
    tracker.log_histograms(4, {"distribution/reward": histogram, "distribution/advantage": Histogram()})
    tracker.close()
    assert run_of(uri, tmp_path).data.metrics == {f"distribution/reward/{q}": 0.0 for q in ("p5", "p50", "p95")}


@pytest.mark.parametrize(("ending", "status"), [("failed", "FAILED"), ("stopped", "KILLED")])
def test_how_the_run_ended_is_said(tmp_path, uri, ending, status):
    MlflowTracker(tmp_path, experiment="ends", uri=uri, ending=lambda: ending).close()
    assert run_of(uri, tmp_path).info.status == status


def test_the_environment_names_the_server(tmp_path, uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    MlflowTracker(tmp_path, experiment="environment").close()
    assert client(uri).get_experiment_by_name("environment") is not None
    assert not (tmp_path / "mlflow").exists()


def test_one_that_fails_leaves_the_others(tmp_path, uri):
    trackers = {
        "mlflow": BackgroundTracker(MlflowTracker(tmp_path, experiment="fails", uri=uri), name="mlflow"),
        "jsonl": JsonlTracker(tmp_path / "metrics.jsonl"),
    }
    client(uri).delete_run((tmp_path / "mlflow_run_id").read_text())  # deleted by a user during the run
    fanout = Fanout(trackers)
    with structlog.testing.capture_logs() as logs:
        for step in range(1, 4):
            fanout.log(step, {"a": 1.0})
        fanout.close()
    assert [row.step for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert ["MlflowException" in entry["error"] for entry in logs if entry["event"] == "tracker_failed"] == [True]


def test_what_mlflow_refuses_is_said_with_a_way_out(tmp_path, uri, monkeypatch):
    (tmp_path / "mlflow_run_id").write_text("0" * 32)
    with pytest.raises(SettingsError, match=r"found MlflowException: .*not found.*remove mlflow_run_id"):
        MlflowTracker(tmp_path, experiment="unknown", uri=uri)
    with pytest.raises(SettingsError, match="must start at /no/such; found MlflowException"):
        MlflowTracker(tmp_path, experiment="unknown", uri="/no/such")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(SettingsError, match=r"Set metrics\.mlflow_uri or MLFLOW_TRACKING_URI to an existing server"):
        MlflowTracker(tmp_path, experiment="unknown", uri=address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts connections, but never answers
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(
            SettingsError, match=r"Set metrics\.mlflow_uri or MLFLOW_TRACKING_URI to an existing server"
        ):
            MlflowTracker(tmp_path, experiment="unknown", uri=address)
    experiment = client(uri).create_experiment("gone")
    client(uri).delete_experiment(experiment)
    with pytest.raises(SettingsError, match="'gone' is deleted"):
        MlflowTracker(tmp_path / "new", experiment="gone", uri=uri)


def test_a_broken_id_is_refused(tmp_path, uri):
    (tmp_path / "mlflow_run_id").write_bytes(b"../x\xff")
    with pytest.raises(DataError, match="must contain the id"):
        MlflowTracker(tmp_path, experiment="broken", uri=uri)


def test_after_close_it_says_so(tmp_path, uri):
    tracker = MlflowTracker(tmp_path, experiment="closed", uri=uri)
    tracker.close()
    for call in (
        lambda: tracker.log(1, {}),
        lambda: tracker.log_histograms(1, {}),
        lambda: tracker.log_generations(1, "a", []),
    ):
        with pytest.raises(NotReadyError, match="has ended"):
            call()


def test_without_mlflow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-metrics\[mlflow\]"):
        MlflowTracker(tmp_path, experiment="missing")


def escaped_character(match):
    return chr(int(match[1], 16)) if match[1] else ""


@given(
    st.one_of(st.text("_at@:/.x7b{} ", max_size=12), st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
)
@example("_at_at_")
@example("_at@")
@example("a//../b/")
@example("..x")
@example("")
def test_names_are_taken_by_mlflow_and_stay_apart(name):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    plain = mlflow_name(name)
    _validate_metric_name(plain)
    _validate_param_name(plain)
    assert len(plain) <= 250
    if len(plain) < 250:
        assert re.sub(":([0-9a-f]*):", escaped_character, plain.replace("_at_", "@")) == name


def test_long_names_are_cut_and_stay_apart():
    names = ["x" * 400 + end for end in "ab"]
    plain = [mlflow_name(name) for name in names]
    assert [len(one) for one in plain] == [250, 250]
    assert plain[0] != plain[1]


def test_two_trackers_keep_their_own_addresses(tmp_path, monkeypatch, uri):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    second = f"sqlite:///{tmp_path}/second.db"
    (tmp_path / "second.db").write_bytes(Path(uri.removeprefix("sqlite:///")).read_bytes())
    trackers = [MlflowTracker(tmp_path / name, experiment="two", uri=one) for name, one in (("a", uri), ("b", second))]
    assert "MLFLOW_TRACKING_URI" not in os.environ, "children would inherit it"
    for value, tracker in enumerate(trackers):
        tracker.log(1, {"a": float(value)})
        tracker.close()
    runs = [(tmp_path / name / "mlflow_run_id").read_text() for name in ("a", "b")]
    assert [client(one).get_run(run).data.metrics["a"] for one, run in zip((uri, second), runs, strict=True)] == [0, 1]
