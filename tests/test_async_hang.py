"""Runs that hang: hang.json shows who does not answer and what each role does, and the run fails or continues."""

import os
import re
import signal
from pathlib import Path

import pytest
from async_runs import async_training, role_pid, run_states
from tiny_run import REWARDS_BEFORE_STEP_1, REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run
from train_process import TrainProcess, wait_until_held

from rl_metrics.hang import HangReport, read_hang_report
from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

DEADLINE_S = 5.0
"""Longer than a step on a busy machine, so that only hangs are reported."""
REWARD = " in the reward reward.py:reward"
IN_STEP_2 = REWARDS_BEFORE_STEP_1 + REWARDS_PER_STEP + 5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def run(inputs: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_tiny_run(inputs, tmp_path / "run")


def settings(**changes: object) -> dict[str, object]:
    return {
        "roles__hang_deadline_s": DEADLINE_S,
        "reward__timeout_s": None,
        "trainer__validate_every": 0,
        "trainer__steps": 3,
        **changes,
    }


def assert_failed(process: TrainProcess, run: TinyRun) -> HangReport:
    """Check that the run failed with the summary of hang.json and left no process; return the report."""
    assert process.wait() == 1, process.text
    assert process.leftovers() == []
    assert "HangError" in process.text, process.text
    report = read_hang_report(run.run_folder / "hang.json")
    assert report.summary in process.text
    assert "error: HangError: no progress for " in process.text
    assert "Traceback" not in process.text
    assert report.no_progress_s >= DEADLINE_S
    events = read_events(run.run_folder / "events.jsonl")
    assert [event["event"] for event in events if str(event["event"]).startswith("run_")][-2:] == [
        "run_hung",
        "run_failed",
    ]
    return report


def test_a_reward_that_never_returns(run: TinyRun):
    with async_training(run, hold_after=IN_STEP_2, **settings()) as process:
        report = assert_failed(process, run)
    assert report.causes == ()
    assert report.summary.endswith("; all roles answer")
    assert [role.name for role in report.roles] == ["controller", "rollouter", "learner"]
    assert all("File " in role.stack for role in report.roles)
    controller, rollouter, learner = report.roles
    assert re.fullmatch(r"lacks \d of 4 groups of step 2(, the first \S+)?", controller.doing)
    assert re.match(r"waits for the next order, for \d+ s", learner.doing)
    assert re.match(r"\d groups? in progress, the oldest \S+ for \d+ s, ", rollouter.doing)
    assert REWARD in rollouter.doing
    assert "reward.py" in rollouter.stack, "the stack shows where the reward hangs"
    assert report.queue["rows"] >= 0
    assert report.last_progress


def test_a_reward_that_never_returns_for_a_validation_problem_inline(run: TinyRun):
    with async_training(run, hold_after=3, **settings(roles__placement="inline")) as process:
        report = assert_failed(process, run)
    assert report.summary.endswith("; all roles answer")
    assert REWARD in report.roles[1].doing


def test_a_run_that_may_go_on_does_when_the_reward_returns(run: TinyRun):
    file = run.run_folder / "hang.json"
    with async_training(run, hold_after=IN_STEP_2, **settings(roles__on_hang="report")) as process:
        process.wait_until(file.exists, "hang.json")
        (run.folder / "released").touch()
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
    report = read_hang_report(file)
    assert report.summary in process.text
    assert set(run_states(run.run_folder).values()) == {"done"}
    assert [row.step for row in read_metrics(run.run_folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [event["event"] for event in read_events(run.run_folder / "events.jsonl")].count("run_hung") >= 1


@pytest.mark.slow
def test_an_engine_that_is_stopped(run: TinyRun):
    with async_training(run, hold_after=IN_STEP_2, **settings(rollout__placement="process")) as process:
        wait_until_held(process, run)
        os.kill(role_pid(run, "transformers-engine-0"), signal.SIGSTOP)
        (run.folder / "released").touch()
        report = assert_failed(process, run)
    assert [role.name for role in report.roles] == ["controller", "rollouter", "learner", "engine[0]"]
    assert not report.roles[3].is_answering
    assert [cause.partition(" (")[0] for cause in report.causes] == ["engine[0] does not answer"]


def test_a_learner_that_is_stopped(run: TinyRun):
    with async_training(run, hold_after=IN_STEP_2, **settings()) as process:
        wait_until_held(process, run)
        os.kill(role_pid(run, "learner-host-0"), signal.SIGSTOP)
        (run.folder / "released").touch()
        report = assert_failed(process, run)
    assert any(cause.startswith("learner does not answer") for cause in report.causes)
    learner = report.roles[2]
    assert not learner.is_answering
