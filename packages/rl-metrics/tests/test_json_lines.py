import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import structlog

from rl_core.errors import DataError, NotReadyError
from rl_metrics.reductions.histogram import Histogram
from rl_metrics.run_files.generations import GenerationSample
from rl_metrics.run_files.json_lines import JsonLinesWriter, number_or_nan, number_or_none, read_json_lines
from rl_metrics.trackers.jsonl import (
    JsonlTracker,
    MetricRow,
    as_step,
    read_generations,
    read_histograms,
    read_metrics,
)

ENDLESS = """
import sys
from pathlib import Path
from rl_metrics.trackers.jsonl import JsonlTracker
tracker = JsonlTracker(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    tracker.log(step, {"actor/entropy": step / 3, "text" * 200: 1.0})
    if step == 50:
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
"""


def test_lines_are_there_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    tracker = JsonlTracker(path, clock=lambda: 12.3456)
    tracker.log(1, {"actor/entropy": 0.5})
    assert path.read_text() == '{"step":1,"time":12.346,"actor/entropy":0.5}\n'
    tracker.close()
    tracker.close()


def test_a_restart_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        tracker = JsonlTracker(path, clock=lambda: 1.0)
        tracker.log(step, {"a": float(step)})
        tracker.close()
    assert read_metrics(path) == [
        MetricRow(step=1, time=1.0, metrics={"a": 1.0}),
        MetricRow(step=2, time=1.0, metrics={"a": 2.0}),
    ]


def test_a_torn_last_line_spoils_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"time":1,"a":1}\n{"step":2,"time":1,"a')
    with structlog.testing.capture_logs() as logs:
        assert [row.step for row in read_metrics(path)] == [1]
    assert logs == []  # a writer may still complete it
    tracker = JsonlTracker(path)
    tracker.log(2, {"a": 2.0})
    tracker.log(3, {"a": 3.0})
    with structlog.testing.capture_logs() as logs:
        assert [row.step for row in read_metrics(path)] == [1, 2, 3]
    assert logs == [
        {"event": "unreadable_lines", "log_level": "warning", "path": str(path), "count": 1, "first_line": 2}
    ]
    assert path.read_text().count("\n") == 4


def test_kill_9_loses_no_earlier_line_and_the_file_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
        finally:
            os.kill(process.pid, signal.SIGKILL)
    steps = [row.step for row in read_metrics(path)]
    assert len(steps) >= 50
    assert steps == list(range(1, len(steps) + 1))
    tracker = JsonlTracker(path)
    tracker.log(len(steps) + 1, {"a": 1.0})
    assert read_metrics(path)[-1].step == len(steps) + 1


def test_repeated_steps_of_a_resumed_run_replace_what_came_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 30.0)):
        tracker.log(step, {"a": value})
    assert [(row.step, row.metrics["a"]) for row in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_values_that_are_not_finite_are_null_and_come_back_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {"a": float("nan"), "b": float("inf"), "c": np.float32(0.5), "d": 3})
    row = json.loads(path.read_text())
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, 0.5, 3.0)
    metrics = read_metrics(path)[0].metrics
    assert np.isnan(metrics["a"])
    assert metrics["d"] == 3.0


@pytest.mark.parametrize(
    "bad", ['{"step":"x","a":1}', '{"step":true}', "[1,2]", "null", "\x00\x01", "{" * 100_000, '{"a":1}', "NaN"]
)
def test_lines_that_are_no_step_are_left_out(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step":1,"time":1}}\n{bad}\n\n{{"step":2,"time":"soon","a":"text"}}\n')
    rows = read_metrics(path)
    assert [row.step for row in rows] == [1, 2]
    assert np.isnan(rows[1].time)
    assert np.isnan(rows[1].metrics["a"])


def test_bytes_that_are_no_text_are_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n\xff\xfe\n{"a":2}\n')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


def test_anything_can_be_written(tmp_path):
    path = tmp_path / "lines.jsonl"
    writer = JsonLinesWriter(path)
    writer.append({"path": path, "array": np.arange(2), "nested": {"x": (1, None, True)}, "text": "é\n\ud800"})
    row = next(read_json_lines(path))
    assert row == {"path": str(path), "array": [0, 1], "nested": {"x": [1, None, True]}, "text": "é\n?"}


def generation(name, **changed):
    given = {"prompt_uid": name, "input": "1+1", "output": "2", "score": 1.0, "policy_version": (3, 4), "source": "r"}
    return GenerationSample(**(given | changed))


def test_generations_are_whole_lines_with_step_and_name(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", clock=lambda: 1.5)
    assert not (tmp_path / "generations.jsonl").exists()
    long = "é\n\x1b" * 5000
    tracker.log_generations(7, "val/generations", [generation("p1", output=long, components={"acc": float("nan")})])
    line = (tmp_path / "generations.jsonl").read_text()
    assert json.loads(line) == {
        "step": 7,
        "time": 1.5,
        "name": "val/generations",
        "index": 0,
        "prompt_uid": "p1",
        "input": "1+1",
        "output": long,
        "score": 1.0,
        "ground_truth": None,
        "policy_version": [3, 4],
        "source": "r",
        "failure": None,
        "components": {"acc": None},
        "data_source": "default",
        "finish": "stop",
        "images": [],
    }
    assert line.count("\n") == 1
    tracker.close()
    with pytest.raises(NotReadyError, match=r"generations\.jsonl is closed"):
        tracker.log_generations(8, "val/generations", [])


def test_generations_are_read_back_as_the_run_stands(tmp_path):
    path = tmp_path / "generations.jsonl"
    for attempt, steps in enumerate(((0, 5, 10), (5,))):
        tracker = JsonlTracker(tmp_path / "metrics.jsonl", clock=lambda attempt=attempt: attempt)
        for step in steps:
            tracker.log_generations(step, "val", [generation(f"{attempt}-{name}") for name in "ab"])
            tracker.log_generations(step, "train", [generation("x")])
        tracker.close()
    tables = read_generations(path)
    assert [(table.step, table.name, [one.prompt_uid for one in table.samples]) for table in tables] == [
        (0, "val", ["0-a", "0-b"]),
        (0, "train", ["x"]),
        (5, "val", ["1-a", "1-b"]),
        (5, "train", ["x"]),
    ]
    assert tables[0].samples[0] == generation("0-a")
    assert [table.step for table in read_generations(path, with_replaced=True)] == [0, 0, 5, 5, 10, 10, 5, 5]


def test_lines_that_are_no_sample_are_left_out(tmp_path):
    path = tmp_path / "generations.jsonl"
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", clock=lambda: 1.0)
    tracker.log_generations(1, "val", [generation("a")])
    good = path.read_text()
    for broken in ('{"step":1}', good.replace('"r"', "3"), good.replace('"index":0', '"index":null'), good[:-9]):
        path.write_text(f"{good}{broken}\n")
        assert [len(table.samples) for table in read_generations(path)] == [1]


def test_after_close_it_says_so(tmp_path):
    writer = JsonLinesWriter(tmp_path / "lines.jsonl")
    writer.close()
    with pytest.raises(NotReadyError, match="is closed"):
        writer.append({})


def test_late_metrics_join_their_step_and_replace_nothing(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        tracker.log(step, {"actor/loss": float(step)})
    tracker.log_late(2, {"val-core/all/reward/mean@1": 0.5})
    tracker.log_late(9, {"val-core/all/reward/mean@1": 0.9})  # a step that does not exist
    tracker.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2, 3]
    assert rows[1].metrics == {"actor/loss": 2.0, "val-core/all/reward/mean@1": 0.5}
    assert rows[2].metrics == {"actor/loss": 3.0}


def histogram(*values):
    one = Histogram()
    one.add(values)
    return one


def test_histograms_lie_beside_the_metrics(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", clock=lambda: 1.0)
    tracker.log(1, {"a": 1.0})
    assert not (tmp_path / "histograms.jsonl").exists()
    tracker.log_histograms(1, {"distribution/reward": histogram(1.0)})
    tracker.close()
    sketch = histogram(1.0).to_json()
    assert json.loads((tmp_path / "histograms.jsonl").read_text()) == {
        "step": 1,
        "time": 1.0,
        "histograms": {"distribution/reward": sketch},
    }
    (row,) = read_histograms(tmp_path / "histograms.jsonl")
    assert (row.step, row.time) == (1, 1.0)
    assert row.histograms["distribution/reward"].to_json() == sketch
    with pytest.raises(NotReadyError, match="is closed"):
        tracker.log_histograms(2, {})


def test_histograms_of_repeated_steps_torn_lines_and_nonsense(tmp_path):
    path = tmp_path / "histograms.jsonl"
    for steps, value in ((range(1, 5), 1.0), (range(3, 6), 2.0)):
        tracker = JsonlTracker(tmp_path / "metrics.jsonl")
        for step in steps:
            tracker.log_histograms(step, {"distribution/reward": histogram(value)})
        tracker.close()
    bad = histogram(7.0).to_json() | {"counts": "many"}
    with path.open("a") as file:
        file.write(json.dumps({"step": "6", "histograms": {}}) + "\n")
        file.write(json.dumps({"step": 7, "histograms": []}) + "\n")
        file.write(json.dumps({"step": 6, "histograms": {"a": bad, "b": histogram(3.0).to_json(), "c": None}}) + "\n")
        file.write('{"step": 1, "histograms": {"a')
    with structlog.testing.capture_logs():
        rows = read_histograms(path)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.histograms["distribution/reward"].max for row in rows[:5]] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert list(rows[-1].histograms) == ["b"]
    assert np.isnan(rows[-1].time)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (3, 3),
        (3.0, 3),
        (-1.0, -1),
        (2**63 - 1, 2**63 - 1),
        *((value, None) for value in (3.5, True, "3", None, [3], 2**63, 2.0**63, math.inf, math.nan)),
    ],
)
def test_steps_that_were_read(value, step):
    assert as_step(value) == step
    assert type(as_step(value)) is type(step)


def test_every_reader_takes_a_whole_float_as_a_step_and_says_which_lines_have_none(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", clock=lambda: 1.0)
    tracker.log(3, {"a": 1.0})
    tracker.log_generations(3, "val", [generation("p")])
    tracker.log_histograms(3, {"distribution/reward": histogram(1.0)})
    tracker.close()
    for name, read in (
        ("metrics.jsonl", read_metrics),
        ("generations.jsonl", read_generations),
        ("histograms.jsonl", read_histograms),
    ):
        path = tmp_path / name
        line = path.read_text()
        path.write_text(line.replace('"step":3', '"step":3.0') + line.replace('"step":3', '"step":3.5') * 2)
        with structlog.testing.capture_logs() as logs:
            assert [row.step for row in read(path)] == [3]
        assert logs == [
            {"event": "lines_without_step", "log_level": "warning", "path": str(path), "count": 2, "first_line": 2}
        ]


@pytest.mark.parametrize(
    ("value", "as_nan", "as_none"),
    [
        (2, 2.0, 2.0),
        (-0.5, -0.5, -0.5),
        (True, 1.0, None),
        (math.inf, None, None),
        (math.nan, None, None),
        (10**400, None, None),
        ("3", None, None),
        (None, None, None),
        ([1], None, None),
    ],
)
def test_numbers_that_were_read(value, as_nan, as_none):
    number = number_or_nan(value)
    assert (None if math.isnan(number) else number) == as_nan
    assert number_or_none(value) == as_none


@pytest.mark.parametrize("step", ["a", -1, 1.0, None, 2**63, np.int64(-2)])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for log in (
        lambda: tracker.log(step, {"a": 1.0}),
        lambda: tracker.log_late(step, {"a": 1.0}),
        lambda: tracker.log_generations(step, "val", [generation("p")]),
        lambda: tracker.log_histograms(step, {"a": Histogram()}),
    ):
        with pytest.raises(DataError, match="a step must be an integer >= 0"):
            log()
    tracker.log(np.int64(3), {"a": 1.0})
    assert [row.step for row in read_metrics(tmp_path / "metrics.jsonl")] == [3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
