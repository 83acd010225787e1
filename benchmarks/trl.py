"""Compare GRPO with TRL's GRPOTrainer: same policy, prompts, group size, sampling, learning rate and steps.

    nox -s bench -- trl [--workload short,long_tail,long_prompt] [--pairs 3] [--steps N] [--quick] [--json FILE]

Runs of the two systems alternate, so that a slow minute of the machine affects both. benchmarks/README.md describes the
measurements and why the comparison is fair. --quick runs a few steps of a tiny policy, without TRL.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _children import BENCHMARKS, LEFT_OUT, ChildFailedError, run_child
from _quick_run import write_quick_run
from _sides import ROOT, run_ours, run_trl
from _summary import WARM_UP_STEPS, Run, comparison, histogram, samples_per_s, share_below, system_result
from _workloads import Workload, named

from rl_trainer_parts.commands.command_line import configure_logs

WORKLOADS = (
    Workload(
        name="short",
        settings=ROOT / "examples" / "arithmetic" / "settings.toml",
        preparation=ROOT / "examples" / "arithmetic" / "prepare.py",
        rule="arithmetic",
        steps=20,
        target=1.25,
        trl_micro_batch=128,
        trl_continuous_batching=False,
    ),
    Workload(
        name="long_tail",
        settings=BENCHMARKS / "long_tail.toml",
        preparation=BENCHMARKS / "_long_tail.py",
        rule="counting",
        steps=10,
        target=4.2,
        trl_micro_batch=128,
        trl_continuous_batching=False,
    ),
    Workload(
        name="long_prompt",
        settings=BENCHMARKS / "long_prompt.toml",
        preparation=BENCHMARKS / "_long_tail.py",
        rule="counting",
        steps=7,
        target=3.0,
        trl_micro_batch=64,
        trl_continuous_batching=False,
    ),
)
TYPICAL_TOKENS = 48
LONGEST_TOKENS = 192


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless something breaks; targets are reported."""
    options = parse(words)
    python = os.environ.get("TRL_PYTHON", "")
    if not (options.quick or Path(python).is_file()):
        return complain(f"TRL_PYTHON must name the python of an environment with TRL; found {python!r}. See README.md.")
    if options.pairs < 1 or (options.steps is not None and options.steps <= WARM_UP_STEPS):
        return complain(f"--pairs must be at least 1, and --steps more than the {WARM_UP_STEPS} warm-up steps.")
    os.chdir(ROOT)
    configure_logs()
    report = new_report(options)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
            workloads = named(options.workload.split(","), WORKLOADS)
            if options.quick:
                settings = write_quick_run(Path(folder))
                workloads = [replace(workload, settings=settings, preparation=None) for workload in workloads]
            for workload in workloads:
                prepare(workload, Path(folder))
                steps = options.steps or workload.steps
                peer_python = None if options.quick else python
                ours, peer = run_pairs(workload, python=peer_python, pairs=options.pairs, steps=steps)
                add_workload(report, workload, ours, peer)
                print_workload(report, workload.name)
    except ChildFailedError as error:
        return complain(str(error), status=1)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- trl", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workload", default="short,long_tail,long_prompt", help="comma-separated workloads to run")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each system")
    parser.add_argument("--steps", type=int, help="steps of a run; each workload has its own default")
    parser.add_argument("--quick", action="store_true", help="one short run of ours, without TRL, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.workload, options.pairs, options.steps = "short", 1, WARM_UP_STEPS + 1
    return options


def new_report(options: argparse.Namespace) -> dict[str, Any]:
    """Return the part of the report that is known before the first run."""
    return {
        "benchmark": "trl",
        "is_quick": options.quick,
        "machine": {"cores": os.cpu_count(), "processor": processor(), "python": platform.python_version()},
        "pairs": options.pairs,
        "warm_up_steps": WARM_UP_STEPS,
        "results": [],
        "comparisons": [],
        "response_lengths": {},
        "skipped": {"trl": LEFT_OUT} if options.quick else {},
    }


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def prepare(workload: Workload, folder: Path) -> None:
    """Prepare the files that the workload's settings name, with the log in the folder.

    Raises:
        ChildFailedError: It failed.
    """
    if workload.preparation is not None:
        say(f"{time.strftime('%H:%M:%S')}  {workload.name}: preparing, which takes minutes the first time")
        run_child([sys.executable, str(workload.preparation)], folder / f"preparation of {workload.name}.log")


def run_pairs(workload: Workload, *, python: str | None, pairs: int, steps: int) -> tuple[list[Run], list[Run]]:
    """Run ours and TRL alternately; each pair has its own seed for the order of prompts and for sampling.

    Args:
        workload: The workload.
        python: Interpreter of TRL's environment; None leaves TRL out.
        pairs: Runs of each system.
        steps: Steps of a run.

    Raises:
        ChildFailedError: A run failed.
    """
    ours, peer = [], []
    for seed in range(pairs):
        with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
            ours.append(run_ours(workload, Path(folder), seed=seed, steps=steps))
            tell(workload, seed, ours[-1])
            if python is not None:
                peer.append(run_trl(workload, Path(folder), seed=seed, steps=steps, python=python))
                tell(workload, seed, peer[-1])
    return ours, peer


def tell(workload: Workload, seed: int, run: Run) -> None:
    """Print one line at the end of a run."""
    speed = samples_per_s(run.step_s, samples_per_step=workload.samples_per_step)
    say(
        f"{time.strftime('%H:%M:%S')}  {workload.name}, pair {seed + 1}, {run.system:4}: {speed:7.1f} samples/s, "
        f"reward {run.rewards[0]:.3f} -> {run.rewards[-1]:.3f} ({run.wall_s:.0f} s, load before {run.load_before:.1f})"
    )


def add_workload(report: dict[str, Any], workload: Workload, ours: Sequence[Run], peer: Sequence[Run]) -> None:
    """Add a workload's results to the report."""
    samples = workload.samples_per_step
    for runs in filter(None, (ours, peer)):
        report["results"].append(system_result(runs, workload=workload.name, samples_per_step=samples))
    if not peer:
        return
    report["comparisons"].append(
        comparison(ours, peer, workload=workload.name, samples_per_step=samples, target=workload.target)
    )
    lengths = [length for run in peer for length in run.lengths]
    report["response_lengths"][workload.name] = {
        f"share_below_{TYPICAL_TOKENS}": round(share_below(lengths, TYPICAL_TOKENS), 4),
        "mean": round(sum(lengths) / len(lengths), 2),
        "max": max(lengths),
        "histogram": histogram(lengths, width=16, longest=LONGEST_TOKENS),
    }


def print_workload(report: Mapping[str, Any], name: str) -> None:
    """Return a workload's table, learning curves and lengths."""
    results = [row for row in report["results"] if row["workload"] == name]
    found = next((row for row in report["comparisons"] if row["workload"] == name), None)
    if lengths := report["response_lengths"].get(name):
        typical = lengths[f"share_below_{TYPICAL_TOKENS}"]
        say(f"\n{name}: {lengths['mean']} response tokens on average, {lengths['max']} at most")
        say(f"  {typical:.0%} under {TYPICAL_TOKENS}; {bars(lengths['histogram'])}")
    say(f"  {'system':8}{'samples/s':>10}{'step_s':>9}{'spread':>8}  medians of a step's parts, in s")
    for row in results:
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["part_s_median"].items())
        speed, step_s, noise = row["samples_per_s"], row["step_s_median"], row["samples_per_s_spread"]
        say(f"  {row['system']:8}{speed:>10.1f}{step_s:>9.3f}{noise:>8.0%}  {parts}")
    if found is not None:
        verdict = "met" if found["is_met"] else "missed"
        say(f"  ratio {found['ratio']:.2f} of {found['ratio_pairs']}; wanted at least {found['target']}: {verdict}")
    say("  mean reward of each step")
    for row in results:
        say(f"    {row['system']:5}{' '.join(f'{value:.3f}' for value in row['reward_curve'])}")
    if found is None:
        return
    say(
        f"    final third: ours {found['final_third_reward_ours']:.3f}, trl {found['final_third_reward_trl']:.3f}, "
        f"difference {found['final_third_difference']:+.3f} (pairs {found['final_third_difference_pairs']})\n"
    )


def bars(counts: Mapping[str, int]) -> str:
    """Return the non-empty bins, such as "1-16: 70 %"."""
    total = sum(counts.values())
    return ", ".join(f"{name}: {count / total:.1%}" for name, count in counts.items() if count)


def complain(message: str, *, status: int = 2) -> int:
    """Print an error."""
    sys.stderr.write(f"error: {message}\n")
    return status


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
