"""The report of a run, written by a process beside it."""

from structlog.testing import capture_logs

from rl_metrics.trackers.jsonl import JsonlTracker
from rl_trainer.report_writer import ReportWriter


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


def test_one_is_begun_when_it_is_due_and_closing_waits_for_it(tmp_path):
    run_in(tmp_path)
    writer = ReportWriter(tmp_path, every=2, is_last_written=False)
    writer.log(2, {})
    writer.log(4, {})  # whether or not the first is done by now
    writer.close()
    assert (tmp_path / "report.html").exists()


def test_none_is_written_between_the_steps(tmp_path):
    run_in(tmp_path)
    writer = ReportWriter(tmp_path, every=2, is_last_written=False)
    writer.log(0, {})
    writer.log(3, {})
    writer.close()
    assert not (tmp_path / "report.html").exists()


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
