import os

import pytest
import structlog

from rl_core.errors import DataError
from rl_metrics.run_files.events import EventLog, read_events


def test_events_are_appended_over_restarts(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    for step in (10, 20):
        events = EventLog(path, clock=lambda: 5.0)
        events.write("checkpoint_saved", step=step, folder=tmp_path)
        events.close()
    assert read_events(path) == [
        {"time": 5.0, "event": "checkpoint_saved", "step": 10, "folder": str(tmp_path)},
        {"time": 5.0, "event": "checkpoint_saved", "step": 20, "folder": str(tmp_path)},
    ]


def test_a_full_disk_warns_once_and_stops_nothing(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)  # the disk fills up while the file is open
    os.dup2(full, events._writer._file)
    os.close(full)
    with structlog.testing.capture_logs() as logs:
        events.write("checkpoint_saved", step=1)
        events.write("checkpoint_saved", step=2)
    assert [entry["event"] for entry in logs] == ["event_log_failed"]
    assert "No space left" in logs[0]["error"]


def test_after_close_nothing_is_written(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    events.write("run_started")
    events.close()
    events.close()
    events.write("too_late")
    assert [row["event"] for row in read_events(tmp_path / "events.jsonl")] == ["run_started"]


@pytest.mark.parametrize("name", ["Checkpoint saved", "checkpoint-saved", "step_10!", "", "_x"])
def test_names_are_constant_snake_case(tmp_path, name):
    with pytest.raises(DataError, match="constant snake_case"):
        EventLog(tmp_path / "events.jsonl").write(name)


def test_reserved_fields_are_refused(tmp_path):
    with pytest.raises(DataError, match="field 'time', which is reserved"):
        EventLog(tmp_path / "events.jsonl").write("saved", time=1)


def test_warnings_of_the_program_are_copied(tmp_path):
    path = tmp_path / "events.jsonl"
    shown = []

    def sink(_logger, _method, event):
        shown.append(event["event"])
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[EventLog(path, clock=lambda: 1.0).structlog_processor, sink])
    logger.info("step_done", step=1)
    logger.warning("tracker_failed", tracker="wandb")
    assert shown == ["step_done", "tracker_failed"]
    assert read_events(path) == [{"time": 1.0, "event": "tracker_failed", "level": "warning", "tracker": "wandb"}]


def test_within_a_run_the_warnings_of_all_modules_are_events(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0)
    before = structlog.get_config()["processors"]
    with log.copying_warnings():
        structlog.get_logger("any.module").warning("tracker_failed", tracker="wandb")
    assert structlog.get_config()["processors"] == before
    structlog.get_logger("any.module").warning("too_late")
    log.close()
    assert [row["event"] for row in read_events(tmp_path / "events.jsonl")] == ["tracker_failed"]
