"""An asynchronous run that cannot continue ends as failed, with the trace of the failed role only."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from async_faults import (
    assert_trained_exactly_once,
    num_record_lines,
    pid_of,
    scripted_training,
)
from distillation_runs import as_toml
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run
from train_process import TrainProcess

from rl_metrics.run_files.events import read_events

STEPS, LONG_STEPS = 6, 24


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def run(inputs: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(inputs, tmp_path / "run")


def failed_with(run: TinyRun, fault: str, **settings: Any) -> str:
    """Train with a fault that ends the run as failed; return the output."""
    with scripted_training(run, fault=fault, trainer__steps=STEPS, **settings) as process:
        assert process.wait() == 1, process.text
        assert process.leftovers() == []
    events = read_events(run.run_folder / "events.jsonl")
    assert events[-1]["event"] == "run_failed"
    assert [event for event in events if event["event"] == "run_started"] == events[:1], "it was started again"
    return process.text


def wait_for_lines(process: TrainProcess, run: TinyRun, count: int) -> None:
    process.wait_until(lambda: num_record_lines(run) >= count, f"{count} lines of the record")


def test_a_learner_that_raises_ends_the_run_with_its_trace(run: TinyRun) -> None:
    said = failed_with(run, "learner:3")
    assert "RuntimeError: the scripted learner failed" in said
    assert "Traceback in learner host[0]" in said
    assert "in train_step" in said


def test_a_role_that_does_not_answer_is_killed_and_started_again(run: TinyRun) -> None:
    with scripted_training(run, trainer__steps=STEPS, roles__heartbeat_deadline_s=6.0) as process:
        wait_for_lines(process, run, 10)
        stopped = pid_of(run, "learner")
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
    assert_trained_exactly_once(run, steps=STEPS)
    events = read_events(run.run_folder / "events.jsonl")
    assert "learner" in [event["role"] for event in events if event["event"] == "role_silent"]
    died = [str(event["error"]) for event in events if event["event"] == "role_died" and event["role"] == "learner"]
    assert any("did not answer for 6 s and was killed" in error for error in died)


def test_engines_that_always_fail_end_the_run_with_their_reason(run: TinyRun) -> None:
    said = failed_with(run, "engine:30")
    assert "the scripted engine failed" in said
    found = re.search(r"all sessions failed in (\d+) consecutive groups", said)
    assert found is not None
    assert int(found[1]) >= 8  # more may have been in flight
    assert "Traceback in rollouter[0]" in said


def test_a_teacher_that_raises_ends_the_run_though_the_learner_waits_for_it(run: TinyRun) -> None:
    teacher = {"model": str(run.folder / "policy"), "engine": "megatron", "data_sources": ["arithmetic"]}
    settings = {"distillation__teachers": as_toml({"known": teacher}), "distillation__top_k": 8}
    said = failed_with(run, "", **settings)
    assert "RuntimeError: the scripted teacher failed" in said
    assert "Traceback in teachers[0]" in said


@pytest.mark.parametrize("role", ["rollouter", "learner"])
def test_a_role_that_dies_too_often_ends_the_run_with_its_last_words(run: TinyRun, role: str) -> None:
    said = failed_with(run, f"mortal {role}:1", **{f"roles__{role}_restarts": 1})
    assert "was killed by signal SIGKILL (9)" in said
    assert f"the scripted {role} ends" in said
    assert "It was restarted 1 time, the maximum" in said
    died = [event["role"] for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"]
    assert died == [role]


def test_a_controller_that_dies_too_often_ends_the_run_as_failed(run: TinyRun) -> None:
    with scripted_training(run, trainer__steps=STEPS, roles__controller_restarts=1) as process:
        for lines in (1, 2):
            wait_for_lines(process, run, lines)
            os.kill(pid_of(run, "controller") or 0, signal.SIGKILL)
        assert process.wait() == 128 + signal.SIGKILL, process.text
        assert process.leftovers() == []
    assert "SIGKILL ended the run's process; restarting it (0 restarts left)" in process.text
    assert "error: signal 9 (SIGKILL) ended the run's process." in process.text
    assert not (run.run_folder / "summary.json").exists()
    last = read_events(run.run_folder / "events.jsonl")[-1]
    assert (last["event"], last["role"]) == ("run_failed", "controller")
    assert "signal 9 (SIGKILL) ended the run's process. It was restarted 1 time, the maximum" in str(last["error"])


def stopped_step(run: TinyRun) -> int:
    """Return the last step of a stopped run, after checking that it has a checkpoint."""
    summary = json.loads((run.run_folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert Path(summary["checkpoint"]).name == f"step_{summary['steps']}"
    return int(summary["steps"])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_writes_a_checkpoint_from_which_the_run_goes_on(run: TinyRun, number: int, status: int) -> None:
    with scripted_training(run, trainer__steps=LONG_STEPS, trainer__checkpoint_every=0) as process:
        wait_for_lines(process, run, 40)
        if number == signal.SIGINT:
            process.signal_group(number)  # as a terminal does
        else:
            process.signal(number)
        assert process.wait() == status, process.text
        assert process.leftovers() == []
        assert "Traceback" not in process.text
    step = stopped_step(run)
    assert 0 < step < LONG_STEPS
    with scripted_training(run, "--resume", trainer__steps=LONG_STEPS) as process:
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
        assert f"resuming from {run.run_folder / 'checkpoints' / f'step_{step}'}" in process.text
    assert_trained_exactly_once(run, steps=LONG_STEPS)


def test_a_run_whose_supervisor_is_killed_stops_with_a_checkpoint(run: TinyRun) -> None:
    with scripted_training(run, trainer__steps=LONG_STEPS, trainer__checkpoint_every=0) as process:
        wait_for_lines(process, run, 40)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.leftovers() == []
    assert 0 < stopped_step(run) < LONG_STEPS
