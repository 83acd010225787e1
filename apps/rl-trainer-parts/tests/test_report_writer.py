"""A run's report, written by a separate process."""

import os
from pathlib import Path

from structlog.testing import capture_logs

from rl_core.cluster.processes.guard import descendants
from rl_core.testing import wait_until
from rl_metrics.trackers.jsonl import JsonlTracker
from rl_trainer_parts.reporting import trackers
from rl_trainer_parts.reporting.trackers import ReportWriter


def run_in(folder, *, steps=3):
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        tracker.log(step, {"actor/entropy": 1.0 / step})
    tracker.close()


def test_the_last_report_is_there_when_the_run_is_closed(tmp_path):
    run_in(tmp_path)
    writer = ReportWriter(tmp_path, every=0)
    writer.log(1, {})
    assert not (tmp_path / "report.html").exists()
    writer.close()
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_one_is_begun_when_it_is_due(tmp_path):
    run_in(tmp_path)
    writer = ReportWriter(tmp_path, every=2)
    writer.log(2, {})
    wait_until((tmp_path / "report.html").exists, "the report to be written", deadline_s=60)
    writer.log(4, {})  # whether or not the first report is finished
    writer.close()
    assert (tmp_path / "report.html").exists()


def test_none_is_written_between_the_steps(tmp_path):
    run_in(tmp_path)
    writer = ReportWriter(tmp_path, every=2)
    writer.log(0, {})
    writer.log(3, {})
    assert num_reports(tmp_path) == 0
    writer.close()


def test_one_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    run_in(tmp_path)
    monkeypatch.setattr(trackers, "REPORT_S", 0.0)
    writer = ReportWriter(tmp_path, every=2)
    with capture_logs() as logs:
        writer.log(2, {})
        writer.log(4, {})
        wait_until(lambda: num_reports(tmp_path) == 1, "the second report to be begun", deadline_s=60)
        writer.close()
    assert num_reports(tmp_path) == 0
    assert {one["event"] for one in logs} == {"report_failed"}
    assert logs[0]["error"] == "it took more than 0 s"


def num_reports(folder):
    """Return the number of processes that write this run's report; other tests may have left processes."""
    return sum(str(folder) in command_line(pid) for pid, _ in descendants(os.getpid()))


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def test_a_run_that_did_nothing_has_no_report(tmp_path):
    writer = ReportWriter(tmp_path, every=2)
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_is_warned_of(tmp_path):
    writer = ReportWriter(tmp_path / "missing", every=0)
    writer.log(1, {})
    with capture_logs() as logs:
        writer.close()
    assert [(one["event"], "there is no such folder" in one["error"]) for one in logs] == [("report_failed", True)]
