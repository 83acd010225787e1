"""A run that is stopped or killed at any point and resumed equals an uninterrupted run, bit for bit."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from run_equality import ASIDE, assert_equal_runs, learnt, metrics_without_clock, summary
from tiny_run import (
    NUM_PROBLEMS,
    REWARDS_BEFORE_STEP_1,
    REWARDS_PER_STEP,
    TinyRun,
    copy_tiny_run,
    make_tiny_run,
    train_here,
)
from train_process import training, wait_until_held

from rl_metrics.run_files.events import read_events
from rl_metrics.trackers.jsonl import read_metrics

IN_VALIDATION_OF_STEP_2 = REWARDS_BEFORE_STEP_1 + 2 * REWARDS_PER_STEP + NUM_PROBLEMS["validation"] // 2
IN_STEP_3 = REWARDS_BEFORE_STEP_1 + 2 * REWARDS_PER_STEP + NUM_PROBLEMS["validation"] + REWARDS_PER_STEP // 2
IN_STEP_4 = IN_STEP_3 + REWARDS_PER_STEP
IN_LAST_VALIDATION = REWARDS_BEFORE_STEP_1 + 4 * REWARDS_PER_STEP + NUM_PROBLEMS["validation"] + 1


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of four steps without interruption."""
    run = make_tiny_run(tmp_path_factory.mktemp("uninterrupted"))
    assert train_here(run) == 0
    return run


@pytest.fixture
def run(uninterrupted: TinyRun, tmp_path: Path) -> TinyRun:
    """A copy of the inputs, without a run."""
    return copy_tiny_run(uninterrupted, tmp_path / "run")


def resume(run: TinyRun, capsys: pytest.CaptureFixture[str], **settings: int) -> str:
    """Resume the run to its end; return its output."""
    capsys.readouterr()
    assert train_here(run, "--resume", **settings) == 0
    return capsys.readouterr().out


def plain_lines(text: str) -> list[str]:
    """Return the lines of a terminal's output, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").split("\n")


def event_names(run: TinyRun) -> list[str]:
    """Return the names of the run's events, without those about its health."""
    events = read_events(run.run_folder / "events.jsonl")
    return [event["event"] for event in events if event["event"] not in ASIDE]


def test_the_run_trains_and_logs_every_step(uninterrupted: TinyRun) -> None:
    rows = metrics_without_clock(uninterrupted)
    assert [step for step, _ in rows] == [0, 1, 2, 3, 4]
    assert ["val-core/arithmetic/reward/mean@1" in metrics for _, metrics in rows] == [True, False, True, False, True]
    assert min(metrics["actor/grad_norm"] for step, metrics in rows if step) > 0
    first, last = uninterrupted.folder / "policy", uninterrupted.run_folder / "checkpoints" / "step_4" / "policy"
    assert (first / "model.safetensors").read_bytes() != (last / "model.safetensors").read_bytes()
    assert sorted(path.name for path in (uninterrupted.run_folder / "checkpoints").iterdir()) == ["step_2", "step_4"]


def test_run_again_from_nothing_is_the_same(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(run) == 0
    assert_equal_runs(run, uninterrupted)


def test_waiting_for_each_checkpoint_changes_nothing(run: TinyRun, uninterrupted: TinyRun) -> None:
    assert train_here(run, trainer__background_checkpoints=False) == 0
    assert_equal_runs(run, uninterrupted)
    assert event_names(run) == ["run_started", "checkpoint_saved", "checkpoint_saved", "run_finished"]


@pytest.mark.parametrize(
    ("number", "status", "hold_after", "stopped_at"),
    [
        pytest.param(signal.SIGINT, 130, REWARDS_BEFORE_STEP_1 - 1, 0, id="first-validation"),
        pytest.param(signal.SIGTERM, 143, REWARDS_BEFORE_STEP_1 + 1, 0, id="first-step"),
        pytest.param(signal.SIGINT, 130, IN_VALIDATION_OF_STEP_2, 2, id="validation"),
        pytest.param(signal.SIGTERM, 143, IN_LAST_VALIDATION, 4, id="last-validation"),
    ],
)
def test_stopped_here_and_resumed(
    run: TinyRun,
    uninterrupted: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    status: int,
    hold_after: int,
    stopped_at: int,
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("TINY_RUN_HOLD_AFTER", str(hold_after))
        environment.setenv("TINY_RUN_SIGNAL", str(number.value))
        handler = signal.getsignal(number)
        assert train_here(run, reward__timeout_s=None) == status
        assert signal.getsignal(number) is handler
    assert f"stopped after step {stopped_at}; continue with --resume" in capsys.readouterr().out
    stopped = json.loads((run.run_folder / "summary.json").read_text())
    assert (stopped["status"], stopped["steps"]) == ("stopped", stopped_at)
    assert stopped["checkpoint"].endswith(f"step_{stopped_at}")
    assert f"resuming from {run.run_folder / 'checkpoints' / f'step_{stopped_at}'}" in resume(run, capsys)
    assert_equal_runs(run, uninterrupted)


def test_resuming_what_is_done_starts_nothing(
    run: TinyRun, uninterrupted: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(run) == 0
    monkeypatch.setattr("rl_sync_trainer.training_run.make_engine", pytest.fail)
    monkeypatch.setattr("rl_sync_trainer.training_run.start_learners", pytest.fail)
    assert "all 4 steps are done; to continue, raise trainer.steps" in resume(run, capsys)
    assert_equal_runs(run, uninterrupted)


def test_other_prompts_are_refused_at_resume(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(run, trainer__steps=1) == 0
    (run.folder / "train.parquet").write_bytes((run.folder / "validation.parquet").read_bytes())
    assert train_here(run, "--resume") == 2
    assert "has fingerprint = " in capsys.readouterr().err


def test_checkpoints_stay_whole_when_the_one_resumed_from_is_gone(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(run, trainer__steps=1) == 0
    resume(run, capsys, trainer__keep_checkpoints=1, trainer__checkpoint_every=1)
    assert [path.name for path in (run.run_folder / "checkpoints").iterdir()] == ["step_4"]
    assert learnt(run) == learnt(uninterrupted)


def test_a_longer_run_goes_on_where_a_shorter_one_ended(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(run, trainer__steps=2) == 0
    said = resume(run, capsys)
    assert "resuming from" in said
    assert learnt(run) == learnt(uninterrupted)
    assert [row.step for row in read_metrics(run.run_folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert summary(run) == summary(uninterrupted)


def test_a_stopped_run_has_its_report(run: TinyRun) -> None:
    with training(run, hold_after=IN_STEP_3, reward__timeout_s=None, metrics__report=True) as process:
        wait_until_held(process, run)
        process.signal(signal.SIGTERM)
        assert process.wait() == 143, process.text
        assert process.leftovers() == []
    page = (run.run_folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "report_failed" not in process.text


def test_stopped_by_a_terminal_that_closes_and_resumed(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(run, hold_after=IN_STEP_3, columns=80, metrics__console="auto", reward__timeout_s=None) as process:
        wait_until_held(process, run)
        process.close_terminal()
        process.signal(signal.SIGHUP)
        assert process.wait() == 129, process.text
        assert process.leftovers() == []
        assert "Traceback" not in process.text
    stopped = event_names(run)
    assert [name for name in stopped if name != "console_failed"] == ["run_started", "checkpoint_saved", "run_stopped"]
    resume(run, capsys)
    assert event_names(run)[len(stopped) :] == ["run_started", "run_resumed", "checkpoint_saved", "run_finished"]
    assert_equal_runs(run, uninterrupted)


def test_killed_and_resumed(run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    with training(run, hold_after=IN_STEP_4, reward__timeout_s=None) as process:
        wait_until_held(process, run)
        process.wait_until(lambda: "checkpoint_saved" in event_names(run), "checkpoint of step 2")
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.leftovers() == []
    lines = (run.run_folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert not (run.run_folder / "summary.json").exists()
    assert f"resuming from {run.run_folder / 'checkpoints' / 'step_2'}" in resume(run, capsys)
    assert_equal_runs(run, uninterrupted)


def test_engine_process_killed_under_load_is_started_again(run: TinyRun, uninterrupted: TinyRun) -> None:
    with training(run, hold_after=IN_STEP_3, reward__timeout_s=None, rollout__placement="process") as process:
        wait_until_held(process, run)
        (engine,) = process.children()
        os.kill(engine, signal.SIGKILL)
        (run.folder / "released").touch()
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
    assert_equal_runs(run, uninterrupted)


def test_engine_process_killed_and_resumed(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = {"rollout__placement": "process", "replicas__restarts": 0}
    with training(run, hold_after=IN_STEP_3, reward__timeout_s=None, **placement) as process:
        wait_until_held(process, run)
        (engine,) = process.children()
        os.kill(engine, signal.SIGKILL)
        (run.folder / "released").touch()
        assert process.wait() == 1, process.text
        assert process.leftovers() == []
        assert "engine[0]" in process.text
        assert "was killed by signal SIGKILL (9)" in process.text
        assert "Traceback" not in process.text
    failed = read_events(run.run_folder / "events.jsonl")[-1]
    assert failed["event"] == "run_failed"
    assert "engine[0]" in failed["error"]
    resume(run, capsys)
    assert_equal_runs(run, uninterrupted)


def test_ctrl_c_reaches_the_engine_process_too(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"rollout__placement": "process", "metrics__console": "auto", "reward__timeout_s": None}
    with training(run, hold_after=IN_STEP_3, columns=100, **settings) as process:
        wait_until_held(process, run)
        assert len(process.children()) == 1
        process.resize_terminal(60)
        process.wait_until(lambda: "rollouts of step 3 ... 1 s" in process.text, "a display that goes on")
        process.signal_group(signal.SIGINT)
        assert process.wait() == 130, process.text
        assert process.leftovers() == []
        assert "stopping: rollouts of step 3 ... " in process.text
        assert "stopped after step 2" in process.text
        assert "Traceback" not in process.text
    shown = [line.split() for line in plain_lines(process.text)]
    assert ["step", "reward"] in [line[:2] for line in shown], "the table of the last steps"
    assert process.text.rfind("\x1b[?25h") > process.text.rfind("\x1b[?25l"), "the cursor is given back"
    resume(run, capsys)
    assert_equal_runs(run, uninterrupted)


def test_ctrl_c_while_the_engine_process_starts(
    run: TinyRun, uninterrupted: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(run, rollout__placement="process") as process:
        process.wait_until(lambda: "starting transformers engine" in process.text, "start of the engine")
        process.signal_group(signal.SIGINT)
        assert process.wait() == 130, process.text
        assert process.leftovers() == []
        assert "stopping: starting transformers engine ... " in process.text
        assert "; stopping engines, learner and roles. Ctrl-C again exits at once without saving." in process.text
        assert "stopped after step 0" in process.text
        assert "Traceback (most recent call last)" not in process.text
    resume(run, capsys)
    assert_equal_runs(run, uninterrupted)
