"""A run on three Ray nodes that the SLURM script starts, one of which is killed midway."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_faults import SETTINGS, assert_trained_exactly_once, num_record_lines, pid_of
from slurm_job import HEAD, HOSTS, WORKERS, node_of
from tiny_run import TinyRun, make_tiny_run
from train_process import TrainProcess, command_of, marked_processes

from rl_metrics.run_files.events import read_events

STEPS = 12
SUPPORT = str(Path(__file__).parent / "support")
LINES_BEFORE = 20
"""Of the record: about three steps."""


@contextmanager
def slurm_job(run: TinyRun, **settings: Any) -> Iterator[TrainProcess]:
    """The SLURM script, with every process of its three nodes; killed at the end, where it still runs."""
    words = run.train_words(**{**SETTINGS, "roles__kind": "ray", "trainer__steps": STEPS, **settings})
    output = run.folder / "output.txt"
    environment = {"PYTHONPATH": os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # each of some twenty processes would compile Ray
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(run.folder.parent / "bytecode")}
    job = TrainProcess(words, output=output, environment=environment, module="slurm_job")
    try:
        yield job
    finally:
        job.end()


def processes_of(job: TrainProcess, node: str) -> list[int]:
    """What the job runs on a node."""
    return sorted({*job.children()} & {*marked_processes(f"SLURMD_NODENAME={node}")})


def folder_of(job: TrainProcess, node: str) -> Path:
    """Where a node's Ray has its files."""
    commands = " ".join(command_of(pid) for pid in processes_of(job, node))
    (folder,) = set(re.findall(r"--temp-dir=(/tmp/rl-node-\w+)/ray", commands))
    return Path(folder)


def kill_node(job: TrainProcess, node: str) -> None:
    """Kill every process of a node, as a power failure does; on this machine, its files need to be removed."""
    folder = folder_of(job, node)
    while left := processes_of(job, node):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([], 0.02)
    shutil.rmtree(folder)


def test_a_job_of_three_nodes_goes_on_when_one_is_killed(tmp_path: Path):
    run = make_tiny_run(tmp_path)
    with slurm_job(run) as job:
        job.wait_until(lambda: num_record_lines(run) >= LINES_BEFORE, f"{LINES_BEFORE} lines of the record")
        homes = {role: node_of(pid_of(run, role) or 0) for role in ("learner", "rollouter")}
        folders = {node: folder_of(job, node) for node in HOSTS}
        lost = next((node for node in homes.values() if node != HEAD), WORKERS[0])
        kill_node(job, lost)
        assert job.wait() == 0, job.text
        assert job.leftovers() == []
    assert [node for node in HOSTS if folders[node].exists()] == []
    died = {event["role"] for event in read_events(run.run_folder / "events.jsonl") if event["event"] == "role_died"}
    assert died == {role for role, node in homes.items() if node == lost}
    assert_trained_exactly_once(run, steps=STEPS)
