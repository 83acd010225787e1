"""A run that the SLURM script starts on three Ray nodes recovers from killed nodes and Ray processes."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from async_faults import SETTINGS, assert_trained_exactly_once, num_record_lines, pid_of, restarts_of
from async_runs import run_states
from slurm_job import HEAD, HOSTS, WORKERS, node_of
from tiny_run import TinyRun, make_tiny_run
from train_process import TrainProcess, command_of, marked_processes

from rl_metrics.run_files.events import read_events

STEPS = 12
SCRIPTED: dict[str, Any] = {**SETTINGS, "roles__placement": "ray", "trainer__steps": STEPS}
SUPPORT = str(Path(__file__).parent / "support")
LINES_BEFORE = 20
"""Lines of the record, about three steps."""


@contextmanager
def slurm_job(run: TinyRun, trainer: str = "async_driver", **settings: Any) -> Iterator[TrainProcess]:
    """The SLURM script with all processes of its three nodes; at the end, those that still run are killed."""
    words = run.train_words(**settings)
    output = run.folder / "output.txt"
    environment = {"TRAINER_MODULE": trainer}
    environment |= {"PYTHONPATH": os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # otherwise, some twenty processes would each compile Ray
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(run.folder.parent / "bytecode")}
    job = TrainProcess(words, output=output, environment=environment, module="slurm_job")
    try:
        yield job
    finally:
        folders = {folder for node in HOSTS for folder in folders_of(job, node)}
        job.end()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def wait_midway(job: TrainProcess, run: TinyRun) -> None:
    """Return once some steps are done; each stage of the start has its own deadline."""
    job.wait_until(run.run_folder.exists, "run, after the start of three nodes")
    job.wait_until(lambda: num_record_lines(run) > 0, "record")
    job.wait_until(lambda: num_record_lines(run) >= LINES_BEFORE, f"{LINES_BEFORE} lines of the record")


def processes_of(job: TrainProcess, node: str) -> list[int]:
    """Return the job's processes on a node."""
    return sorted({*job.children()} & {*marked_processes(f"SLURMD_NODENAME={node}")})


def folders_of(job: TrainProcess, node: str) -> set[Path]:
    """Return the folders of a node's Ray."""
    commands = " ".join(command_of(pid) for pid in processes_of(job, node))
    return {Path(folder) for folder in re.findall(r"--temp-dir=(/tmp/rl-node-\w+)/ray", commands)}


def kill_node(job: TrainProcess, node: str) -> None:
    """Kill all processes of a node, as a power failure does, and remove its files, which are on this machine."""
    (folder,) = folders_of(job, node)
    while left := processes_of(job, node):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([], 0.02)
    shutil.rmtree(folder)


def test_a_job_of_three_nodes_goes_on_when_one_is_killed(tmp_path: Path):
    run = make_tiny_run(tmp_path)
    with slurm_job(run, **SCRIPTED) as job:
        wait_midway(job, run)
        homes = {role: node_of(pid_of(run, role) or 0) for role in ("learner", "rollouter")}
        folders = [folder for node in HOSTS for folder in folders_of(job, node)]
        lost = next((node for node in homes.values() if node != HEAD), WORKERS[0])
        kill_node(job, lost)
        assert job.wait(300.0) == 0, job.text
        assert job.leftovers() == []
    assert len(folders) == len(HOSTS)
    assert [folder for folder in folders if folder.exists()] == []
    died = {event["role"] for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"}
    assert died == {role for role, node in homes.items() if node == lost}
    assert_trained_exactly_once(run, steps=STEPS)


def kill_program(job: TrainProcess, node: str, program: str) -> None:
    """Kill the process of a node that runs one of Ray's programs."""
    (pid,) = [pid for pid in processes_of(job, node) if command_of(pid).split(" ")[0].endswith(f"/{program}")]
    os.kill(pid, signal.SIGKILL)


def programs_of(job: TrainProcess, node: str) -> list[str]:
    """Return the names of the programs on a node."""
    return [command_of(pid).split(" ")[0].rpartition("/")[2] for pid in processes_of(job, node)]


@pytest.mark.soak
def test_a_node_that_loses_its_ray_joins_again(tmp_path: Path):
    run = make_tiny_run(tmp_path)
    with slurm_job(run, **{**SCRIPTED, "trainer__steps": 200}) as job:
        wait_midway(job, run)
        for node in WORKERS:
            kill_program(job, node, "raylet")
            job.wait_until(lambda node=node: "raylet" not in programs_of(job, node), "the end of the node's Ray")
            job.wait_until(lambda node=node: "raylet" in programs_of(job, node), "the node's next Ray")
        assert job.wait(600.0) == 0, job.text
        assert job.leftovers() == []
    assert job.text.count("the Ray worker on") >= len(WORKERS)
    assert_trained_exactly_once(run, steps=200)


@pytest.mark.soak
def test_a_job_whose_head_lost_its_ray_fails_and_the_next_one_resumes(tmp_path: Path):
    run = make_tiny_run(tmp_path)
    settings = {**SCRIPTED, "trainer__steps": 40}
    with slurm_job(run, **settings) as job:
        wait_midway(job, run)
        kill_program(job, HEAD, "gcs_server")
        assert job.wait(600.0) == 1, job.text
        assert job.leftovers() == []
    with slurm_job(run, **settings) as job:
        assert job.wait(600.0) == 0, job.text
        assert job.leftovers() == []
    assert restarts_of(run)["controller"] == 1
    assert_trained_exactly_once(run, steps=40)


@pytest.mark.soak
def test_engines_and_ranks_of_a_killed_node_move(tmp_path: Path):
    """Place two engines and two ranks by settings alone, and kill the worker node with most of them."""
    run = make_tiny_run(tmp_path)
    settings: dict[str, Any] = {
        "roles__placement": "ray",
        "rollout__placement": "ray",
        "replicas__count": 2,
        "replicas__cpus": 1,
        "replicas__gpus": 0,
        "cluster__placement": "ray",
        "cluster__cpus_per_rank": 0.5,
        "cluster__gpus_per_rank": 0,
        "policy__backend": "megatron",
        "parallel__ranks": 2,
        "trainer__steps": 8,
        "trainer__checkpoint_every": 2,
    }
    with slurm_job(run, "rl_async_trainer.main", **settings) as job:
        wait_midway(job, run)
        names = {node: " ".join(command_of(pid) for pid in processes_of(job, node)) for node in WORKERS}
        kill_node(job, max(WORKERS, key=lambda node: names[node].count("engine") + names[node].count("learner")))
        assert job.wait(900.0) == 0, job.text
        assert job.leftovers() == []
    assert set(run_states(run.run_folder).values()) == {"done"}
