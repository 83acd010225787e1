import json
from pathlib import Path

import numpy as np
import pytest
import structlog
from invented_runs import InventedRun

from rl_core.errors import DataError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.events import EventLog
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.rollout_log import RolloutLog, RolloutRow
from rl_metrics.run_files.run_record import ProbeRow, RunRecord, open_run
from rl_metrics.trackers.jsonl import JsonlTracker

SCRIPT = "<script>alert(1)</script>\x1b[31m"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sketch(value):
    histogram = Histogram()
    histogram.add(np.array([float(value)]))
    return histogram.to_json()


@pytest.fixture
def folder(tmp_path):
    """A run folder with every file."""
    folder = tmp_path / "first"
    tracker = JsonlTracker(folder / "metrics.jsonl", clock=lambda: 3.0)
    tracker.log(1, {"actor/entropy": 0.5})
    sample = GenerationSample(prompt_uid="p", input=SCRIPT, output="2", score=1.0, policy_version=(0, 1), source="r")
    tracker.log_generations(1, "val/generations", [sample])
    tracker.close()
    log = EventLog(folder / "events.jsonl", clock=lambda: 4.0)
    log.write("run_started", settings="settings.toml")
    log.close()
    rollouts = RolloutLog(folder / "rollouts.jsonl", clock=lambda: 5.0)
    rollouts.write([RolloutRow(step=1, time=0.0, prompt_uid="p", problem="1+1", prompt=SCRIPT, response="2")])
    rollouts.close()
    write_lines(
        folder / "histograms.jsonl", [{"step": 1, "time": 6.0, "histograms": {"distribution/reward": sketch(0.5)}}]
    )
    probe = {"step": 1, "time": 7.0, "policy_version": 1, "probe": "p", "prompt": "1+1=", "response": "2"}
    write_lines(
        folder / "probes.jsonl",
        [{**probe, "position": 0, "token": "2", "logprob": -0.1, "candidates": [["2", -0.1], [SCRIPT, None]]}],
    )
    (folder / "settings.toml").write_text('[algorithm]\nkind = "grpo"\n')
    (folder / "summary.json").write_text('{"steps": 1}')
    hang = {"at": "", "run": "", "no_progress_s": 1, "causes": ["engine 1 does not answer"], "format": "rl-hang-2"}
    (folder / "hang.json").write_text(json.dumps(hang))
    return folder


def test_every_file_of_a_run(folder):
    run = open_run(folder)
    assert (run.folder, run.name) == (folder, "first")
    assert run.history.steps.tolist() == [1]
    assert run.history.get("actor/entropy").tolist() == [0.5]
    assert [event["event"] for event in run.events] == ["run_started"]
    assert [table.samples[0].input for table in run.generations] == [SCRIPT]
    assert [row.prompt for row in run.rollouts()] == [SCRIPT]
    (distributions,) = run.histograms
    assert (distributions.step, distributions.time) == (1, 6.0)
    assert distributions.histograms["distribution/reward"].max == 0.5
    (probe,) = run.probes
    assert (probe.step, probe.policy_version, probe.probe, probe.position, probe.token) == (1, 1, "p", 0, "2")
    assert (probe.prompt, probe.response, probe.time, probe.logprob) == ("1+1=", "2", 7.0, -0.1)
    assert probe.candidates[0] == ("2", -0.1)
    assert probe.candidates[1][0] == SCRIPT
    assert np.isnan(probe.candidates[1][1])
    assert run.settings == {"algorithm": {"kind": "grpo"}}
    assert run.summary == {"steps": 1}
    assert run.hang.causes == ("engine 1 does not answer",)
    assert run.history is run.history


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "events.jsonl"])
def test_a_run_with_one_file_is_empty_otherwise(folder, tmp_path, name):
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / name).rename(alone / name)
    run = open_run(alone)
    found = {
        "metrics.jsonl": len(run.history.steps),
        "rollouts.jsonl": len(list(run.rollouts())),
        "events.jsonl": len(run.events),
    }
    assert found == {**dict.fromkeys(found, 0), name: 1}
    assert run.generations == run.histograms == run.probes == ()
    assert (run.settings, run.summary, run.hang) == ({}, {}, None)
    assert not run.is_finished
    assert run.history.get("actor/entropy") is None or name == "metrics.jsonl"


def test_a_file_of_metrics_is_a_run(folder, tmp_path):
    other = folder / "seed-3.jsonl"
    other.write_text('{"step":4,"a":1}\n')
    (tmp_path / "linked.jsonl").symlink_to(other)
    for path in (other, tmp_path / "linked.jsonl"):
        run = open_run(path)
        assert (run.name, run.history.steps.tolist()) == ("seed-3", [4])
        assert (run.events, run.summary, list(run.rollouts())) == ((), {}, [])
    run = open_run(folder / "metrics.jsonl")
    assert (run.name, len(run.events)) == ("first", 1)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no such folder or file"):
        open_run(tmp_path / "missing")
    with pytest.raises(DataError, match=r"found none of metrics\.jsonl"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("events", "summary", "is_finished"),
    [
        ([], None, False),
        ([], "{}", False),
        ([], '{"steps": 3}', True),
        (["run_started"], None, False),
        (["run_started", "run_finished"], None, True),
        (["run_started", "run_finished", "warning"], None, True),
        (["run_started", "run_finished", "run_resumed"], '{"steps": 3}', False),
        (["run_started", "run_stopped"], '{"steps": 3}', False),
        (["run_started", "run_failed"], None, False),
        (["run_started", "run_failed", "run_resumed", "run_finished"], None, True),
        ([["run_finished"], None, 3], None, False),
    ],
)
def test_whether_a_run_is_finished(tmp_path, events, summary, is_finished):
    write_lines(tmp_path / "events.jsonl", [{"time": 1.0, "event": event} for event in events])
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    assert open_run(tmp_path).is_finished is is_finished


def test_the_newest_history_of_distributions_and_probes(tmp_path):
    write_lines(
        tmp_path / "histograms.jsonl",
        [{"step": step, "histograms": {"a": sketch(number)}} for number, step in enumerate([1, 2, 3, 2, 4])]
        + [{"step": 5, "histograms": 3}, {"step": True, "histograms": {}}, [1]],
    )
    asked = [(10, "p", 0), (10, "p", 1), (10, "q", 0), (20, "p", 0), (10, "p", 0), (10, "p", 0), (10, "p", 2)]
    write_lines(
        tmp_path / "probes.jsonl",
        [
            {"step": step, "probe": probe, "prompt": "", "response": "", "position": place, "token": str(number)}
            for number, (step, probe, place) in enumerate(asked)
        ],
    )
    run = open_run(tmp_path)
    assert [(row.step, row.histograms["a"].max) for row in run.histograms] == [(1, 0), (2, 3), (4, 4)]
    assert all(np.isnan(row.time) for row in run.histograms)
    assert [(row.step, row.probe, row.position, row.token) for row in run.probes] == [
        (10, "p", 0, "5"),
        (10, "p", 2, "6"),
    ]


def test_what_a_resume_took_back_is_no_more(tmp_path):
    InventedRun(steps=5, trajectories=2).write(tmp_path)
    whole = open_run(tmp_path)
    began = {"event": "run_resumed", "time": whole.history.times[-1] + 1e6}
    for name, row in (("events.jsonl", began), ("metrics.jsonl", {"step": 3, "time": began["time"] + 1})):
        with (tmp_path / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
    resumed = open_run(tmp_path)
    for rows in (lambda run: run.generations, lambda run: run.histograms, lambda run: run.probes, RunRecord.rollouts):
        assert max(row.step for row in rows(whole)) > 3
        assert [row.step for row in rows(resumed)] == [row.step for row in rows(whole) if row.step <= 3]


@pytest.mark.parametrize(
    "changed",
    [
        {"step": "1"},
        {"step": True},
        {"position": 0.5},
        {"token": None},
        {"candidates": [["2"]]},
        {"candidates": [["2", "likely"]]},
        {"candidates": {"2": -0.1}},
        {"logprob": [1]},
    ],
)
def test_lines_that_are_no_probe_are_left_out(tmp_path, changed):
    good = {"step": 1, "probe": "p", "prompt": "", "response": "", "position": 0, "token": "2"}
    write_lines(tmp_path / "probes.jsonl", [{**good, **changed}, {**good, "position": 7}])
    assert [(type(row), row.position) for row in open_run(tmp_path).probes] == [(ProbeRow, 7)]


@pytest.mark.parametrize("content", [b"", b"{", b'"a"', b"\xff\xfe", b"[" * 200_000, b"nan"])
def test_documents_that_are_none_are_empty(tmp_path, content):
    for name in ("settings.toml", "summary.json", "hang.json"):
        (tmp_path / name).write_bytes(content)
    run = open_run(tmp_path)
    assert (run.settings, run.summary, run.hang) == ({}, {}, None)
    assert not run.is_finished


def test_links_to_a_run_and_inside_of_it_are_followed(folder, tmp_path):
    (tmp_path / "newest").symlink_to(folder)
    (folder / "metrics.jsonl").rename(folder / "metrics-1.jsonl")
    (folder / "metrics.jsonl").symlink_to("metrics-1.jsonl")
    run = open_run(tmp_path / "newest")
    assert (run.name, len(run.history.steps)) == ("first", 1)


def test_files_that_cannot_be_opened_are_skipped_with_a_warning(folder):
    for name in ("events.jsonl", "summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    (folder / "events.jsonl").mkdir()
    (folder / "summary.json").symlink_to("nowhere")
    (folder / "metrics.jsonl").symlink_to("metrics.jsonl")
    with structlog.testing.capture_logs() as logs:
        run = open_run(folder)
        assert (run.events, run.summary) == ((), {})
        assert len(run.history.steps) == 0
    assert {Path(entry["path"]).name for entry in logs} == {"events.jsonl", "metrics.jsonl"}
