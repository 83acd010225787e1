"""A run with several learner ranks equals a run with one: in processes, on Ray, and after a rank is killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_equality import metrics_without_clock
from tiny_run import REWARDS_BEFORE_STEP_1, REWARDS_PER_STEP, TinyRun, copy_tiny_run, make_tiny_run, train_here
from train_process import training, wait_until_held

from rl_metrics.run_files.events import read_events

LEARNT = ("actor/", "critic/", "val-", "response_length/")
"""Metrics that depend only on the learner's numbers."""

TP2_DP2 = {"parallel__ranks": 4, "parallel__tensor": 2, "parallel__distributed_optimizer": True}
PP2_DP2 = {"parallel__ranks": 4, "parallel__pipeline": 2}
PROCESSES = {"cluster__placement": "process"}
RAY = {"cluster__placement": "ray", "cluster__cpus_per_rank": 0.1}


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def alone(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """The same run with one rank."""
    run = copy_tiny_run(tiny_run, tmp_path_factory.mktemp("alone"))
    assert train_here(run) == 0
    return run


def assert_same_losses(run: TinyRun, expected: TinyRun) -> None:
    found, wanted = dict(metrics_without_clock(run)), dict(metrics_without_clock(expected))
    assert found.keys() == wanted.keys()
    for step, metrics in wanted.items():
        learnt = {name: value for name, value in metrics.items() if name.startswith(LEARNT)}
        assert {name: found[step][name] for name in learnt} == pytest.approx(learnt, rel=2e-4, abs=2e-5), step


@pytest.mark.parametrize("layout", [TP2_DP2, PP2_DP2], ids=["TP2 DP2", "PP2 DP2"])
@pytest.mark.parametrize("cluster", [PROCESSES, RAY], ids=["process", "ray"])
def test_four_ranks_train_as_one(
    cluster: dict[str, Any], layout: dict[str, Any], tiny_run: TinyRun, alone: TinyRun, tmp_path: Path
):
    run = copy_tiny_run(tiny_run, tmp_path)

    assert train_here(run, **layout, **cluster) == 0

    assert_same_losses(run, alone)


@pytest.mark.parametrize("kind", ["process", "ray"])
def test_two_engines_and_two_ranks_train_as_one_of_each(
    kind: str, tiny_run: TinyRun, alone: TinyRun, tmp_path: Path
) -> None:
    """Each rank sends its own weights to both engines."""
    run = copy_tiny_run(tiny_run, tmp_path)
    settings = {"rollout__placement": kind, "replicas__count": 2, "cluster__placement": kind, "parallel__ranks": 2}
    settings |= {"parallel__tensor": 2, "weights__transport": "direct"}
    shares = {"cluster__cpus_per_rank": 0.1, "replicas__cpus": 0.1} if kind == "ray" else {}

    assert train_here(run, **settings, **shares) == 0

    assert_same_losses(run, alone)


def test_a_run_whose_rank_is_killed_fails_with_its_name_and_goes_on(tiny_run: TinyRun, alone: TinyRun, tmp_path: Path):
    run = copy_tiny_run(tiny_run, tmp_path)
    settings = {**TP2_DP2, **PROCESSES}
    calls_of_validation = 8
    hold_after = REWARDS_BEFORE_STEP_1 + 2 * REWARDS_PER_STEP + calls_of_validation + 3
    with training(run, hold_after=hold_after, **settings) as process:
        wait_until_held(process, run)
        os.kill(rank_pid(run, rank=2), signal.SIGKILL)
        (run.folder / "released").touch()
        assert process.wait() == 1
        assert process.leftovers() == []
        assert "learner[2]" in process.text
        assert "SIGKILL" in process.text
    events = read_events(run.run_folder / "events.jsonl")
    assert events[-1]["event"] == "run_failed"
    assert "learner[2]" in str(events[-1]["error"])
    summary = run.run_folder / "summary.json"
    assert not summary.exists() or json.loads(summary.read_text())["status"] != "finished"

    assert train_here(run, "--resume", **settings) == 0

    assert_same_losses(run, alone)


def rank_pid(run: TinyRun, *, rank: int) -> int:
    """Return the process id of a rank from its log."""
    for line in (run.run_folder / "logs" / f"learner-{rank}.log").read_text().splitlines():
        if "pid" in line:
            return int(line.partition("pid")[2].strip(" =:").split()[0].rstrip(",;)"))
    raise AssertionError("the log names no process")
