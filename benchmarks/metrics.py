"""Measure the cost of metrics and trackers in training, of validating 100,000 responses, and of a large report.

    nox -s bench -- metrics [--steps 40] [--rounds 5] [--quick] [--json FILE]

benchmarks/README.md describes the measurements. --quick uses a tiny policy, and few steps, responses and rollouts.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _children import BENCHMARKS, ChildFailedError, run_child
from _quick_run import write_quick_run

from rl_metrics import ValidationResponses, read_metrics, summarize_validation
from rl_metrics.report import write_report
from rl_metrics.run_files import open_run

sys.path.append(str(BENCHMARKS.parent / "tests" / "support"))
from invented_runs import InventedRun

EXAMPLE = BENCHMARKS.parent / "examples" / "arithmetic"
TIMING = BENCHMARKS / "_metrics_timing.py"
OURS = "ours"
FIRST_STEPS = 3
"""Steps of the main job that are left out of the median, because engines warm up."""

TRACKERS = {"main_job": (), "main_job_all_trackers": ("tensorboard", "wandb", "mlflow")}
"""Trackers of each main job, beside those that are always on."""

GOAL = 0.01
NUM_RESPONSES, NUM_TRAJECTORIES = 100_000, 50_000
QUICK_RESPONSES, QUICK_TRAJECTORIES = 1_000, 500
STEP_SIZE = 50
"""Trajectories per step of the report's run."""


@dataclass(frozen=True, kw_only=True)
class MainJob:
    """Measurements of a run of the main job.

    Attributes:
        step_s: Median seconds of a step.
        metrics_s: Seconds per step in metrics and trackers, including validations.
        parts_ms: Milliseconds per step by part, the largest first.
        num_metrics: Metrics per step.
        closing_s: Seconds after the last step until all trackers are closed and the last report is written.
        probes_s: Seconds per step in which the engine answered probes.
        children_cpu_s: Processor seconds of the processes of reports and trackers.
    """

    step_s: float
    metrics_s: float
    parts_ms: dict[str, float]
    num_metrics: int
    closing_s: float
    probes_s: float
    children_cpu_s: float


def main(words: Sequence[str]) -> int:
    """Run the benchmark and return the exit status: 0 unless something breaks."""
    options = parse(words)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-metrics-") as folder:
            report = measure(options, Path(folder))
    except ChildFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- metrics", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of the main job, at least 5")
    parser.add_argument("--rounds", type=int, default=5, help="validations; the median counts")
    parser.add_argument("--quick", action="store_true", help="few steps, responses and rollouts, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.steps <= FIRST_STEPS + 1 or options.rounds < 1:
        parser.error(f"--steps must be at least {FIRST_STEPS + 2}, --rounds at least 1; found {list(words)}")
    if options.quick:
        options.steps, options.rounds = min(options.steps, FIRST_STEPS + 2), 1
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the content of the results file."""
    load_before = os.getloadavg()[0]
    settings = write_quick_run(folder) if options.quick else prepare(folder)
    jobs = main_jobs(settings, folder, steps=options.steps, is_quick=options.quick)
    step_s = jobs["main_job"].step_s
    num_responses = QUICK_RESPONSES if options.quick else NUM_RESPONSES
    num_trajectories = QUICK_TRAJECTORIES if options.quick else NUM_TRAJECTORIES
    validation_s = validation(num_responses, rounds=options.rounds)
    report_s, size_bytes = report_of(folder / "invented", num_trajectories)
    rows = [
        row(
            name,
            job.metrics_s,
            job.step_s,
            parts_ms=job.parts_ms,
            num_metrics=job.num_metrics,
            closing_s=job.closing_s,
            probes_ms=1e3 * job.probes_s,
            children_cpu_s=job.children_cpu_s,
        )
        for name, job in jobs.items()
    ]
    rows.append(row("validation_100k", validation_s, step_s, num_responses=num_responses))
    rows.append(row("report_50k", report_s, step_s, num_trajectories=num_trajectories, size_mb=size_bytes / 1e6))
    share = jobs["main_job"].metrics_s / step_s
    return {
        "benchmark": "metrics",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "results": rows,
        "step_ms": {name: 1e3 * job.step_s for name, job in jobs.items()},
        "targets": [
            {"target": f"main_job: at most {GOAL:.0%} of a step", "value": share, "is_met": share <= GOAL},
            {"target": "validation_100k: at most 5 s", "value": validation_s, "is_met": validation_s <= 5.0},
            {"target": "report_50k: at most 60 MB", "value": size_bytes / 1e6, "is_met": size_bytes <= 60e6},
        ],
        "environment": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    }


def row(workload: str, seconds: float, step_s: float, **more: Any) -> dict[str, Any]:
    """Return a row of the results; shares refer to a step of the main job."""
    return {
        "system": OURS,
        "workload": workload,
        "per_step_ms": 1e3 * seconds,
        "share_of_step": seconds / step_s,
        **more,
    }


def prepare(folder: Path) -> Path:
    """Prepare the arithmetic example if necessary; return its settings file.

    Raises:
        ChildFailedError: It failed.
    """
    say("preparing the main job, which takes minutes the first time")
    run_child([sys.executable, str(EXAMPLE / "prepare.py")], folder / "preparation.log")
    return EXAMPLE / "settings.toml"


def main_jobs(settings: Path, folder: Path, *, steps: int, is_quick: bool) -> dict[str, MainJob]:
    """Run the trainer as a user does, with its calls timed: each run in its own process, quick ones in one process.

    Raises:
        ChildFailedError: A run failed.
    """
    jobs = [job(name, settings, folder, steps=steps) for name in TRACKERS]
    for part in [jobs] if is_quick else [[one] for one in jobs]:
        run_child([sys.executable, str(TIMING), json.dumps(part)], folder / "main job.log")
    return {name: read_job(folder / name, Path(timed)) for name, (timed, _) in zip(TRACKERS, jobs, strict=True)}


def job(name: str, settings: Path, folder: Path, *, steps: int) -> tuple[str, list[str]]:
    """Return a job of _metrics_timing.py, in a folder with its name."""
    say(f"{name}: {steps} steps, trackers: {', '.join(('metrics.jsonl', 'console', *TRACKERS[name]))}")
    words = [f"--run.directory={folder}", f"--run.name={name}", f"--trainer.steps={steps}", "--metrics.console=lines"]
    words += [f"--metrics.trackers={json.dumps(TRACKERS[name])}"]
    return str(folder / f"{name}.json"), ["train", str(settings), *words]


def read_job(run: Path, timed: Path) -> MainJob:
    """Return the measurements from a run's metrics and timings."""
    found = json.loads(timed.read_text())
    rows = [one.metrics for one in read_metrics(run / "metrics.jsonl") if one.step]
    seconds = {**found["called_s"], "trackers' threads": found["threads_s"]}
    return MainJob(
        step_s=statistics.median(one["timing_s/step"] for one in rows[FIRST_STEPS:]),
        metrics_s=sum(seconds.values()) / len(rows),
        parts_ms={name: 1e3 * value / len(rows) for name, value in sorted(seconds.items(), key=lambda one: -one[1])},
        num_metrics=len(rows[-1]),
        closing_s=found["closing_s"],
        probes_s=found["probes_s"] / len(rows),
        children_cpu_s=found["children_cpu_s"],
    )


def validation(num_responses: int, *, rounds: int) -> float:
    """Measure a validation's statistics: 8 responses per prompt, 3 sources, 2 variables, predictions."""
    random = np.random.default_rng(0)
    num_prompts = num_responses // 8
    prompts = np.repeat(np.arange(num_prompts), 8)
    solved = random.random(num_prompts)[prompts]
    responses = ValidationResponses(
        uids=[f"prompt-{index}" for index in prompts],
        sources=[f"source-{index % 3}" for index in prompts],
        variables={"acc": (random.random(len(prompts)) < solved).astype(float), "reward": random.random(len(prompts))},
        predictions=[str(index) for index in random.integers(0, 5, len(prompts))],
    )
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        summarize_validation(responses)
        taken.append(time.perf_counter() - began)
    say(f"a validation of {len(prompts):,} responses: {statistics.median(taken):.2f} s")
    return statistics.median(taken)


def report_of(folder: Path, num_trajectories: int) -> tuple[float, int]:
    """Measure the time and size of the report of a run with a number of trajectories of about 50 tokens."""
    InventedRun(steps=num_trajectories // STEP_SIZE, trajectories=STEP_SIZE, tokens=50).write(folder)
    began = time.perf_counter()
    write_report([open_run(folder)], folder / "report.html")
    seconds, size_bytes = time.perf_counter() - began, (folder / "report.html").stat().st_size
    say(f"a report of {num_trajectories:,} trajectories: {seconds:.1f} s, {size_bytes / 1e6:.0f} MB")
    return seconds, size_bytes


def print_report(report: dict[str, Any]) -> None:
    """The tables."""
    say(f"\n  {'workload':24}{'ms a step':>12}{'share of a step':>18}")
    for one in report["results"]:
        say(f"  {one['workload']:24}{one['per_step_ms']:>12.2f}{one['share_of_step']:>18.2%}")
    for name in ("main_job", "main_job_all_trackers"):
        found = next(one for one in report["results"] if one["workload"] == name)
        say(f"\n{name}: a step of {report['step_ms'][name]:.0f} ms, of that")
        for part, milliseconds in list(found["parts_ms"].items())[:8]:
            say(f"  {part:56}{milliseconds:>8.3f} ms")
        say(
            f"  beside: {found['probes_ms']:.1f} ms a step of answering probes, {found['closing_s']:.1f} s to close, "
            f"{found['children_cpu_s']:.1f} s of reports' processes"
        )
    say("")
    for target in report["targets"]:
        say(f"  {'met   ' if target['is_met'] else 'missed'}  {target['target']}: {target['value']:.3g}")


def say(line: str) -> None:
    """Write a line and flush it."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
