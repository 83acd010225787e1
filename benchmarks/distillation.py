"""Compare top-k forward KL through a student's output matrix, forward and backward, with the full softmax.

    nox -s bench -- distillation [--preset cpu] [--rounds 3] [--threads 2] [--quick] [--json FILE]

Both sides are processes that take turns, one step each; benchmarks/README.md describes the measurements.
--quick runs one round of a tiny preset.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _children import BENCHMARKS, ChildFailedError, Peer
from _distillation_workload import PRESETS

OURS, FULL = "ours", "full_softmax"
SIDE = BENCHMARKS / "peers" / "distillation_side.py"
STEP_TIMEOUT_S = 600.0
WORKLOAD = "top_k_forward_kl"
MOST_MEMORY, LEAST_SPEED = 0.25, 1.0
"""Targets, as ratios of ours to the full softmax."""
TOLERANCE = {"cpu": 1e-4, "gpu": 2e-2, "tiny": 1e-4}
"""Relative tolerance of losses and gradient norms; a GPU computes in bfloat16."""


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a side fails or they disagree; targets are reported."""
    options = parse(words)
    if min(options.rounds, options.threads) < 1:
        sys.stderr.write(f"error: --rounds and --threads must be at least 1; found {words}\n")
        return 2
    if options.json is not None and not options.json.absolute().parent.is_dir():
        sys.stderr.write(f"error: --json {options.json}: there is no folder {options.json.absolute().parent}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the sides as Ctrl-C does
    preset = PRESETS[options.preset]
    say(
        f"{preset.num_tokens} tokens, vocabulary {preset.vocab_size:,}, k = {preset.top_k}, hidden "
        f"{preset.hidden_size}, {preset.dtype}, {options.threads} threads, {options.rounds} rounds"
    )
    load = os.getloadavg()[0]
    try:
        steps = run_sides(options)
    except ChildFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    report = summarize(steps, options, load_before=load)
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    if not report["comparison"]["do_agree"]:
        sys.stderr.write("error: the sides computed different results; see largest_relative_difference\n")
        return 1
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    parser = argparse.ArgumentParser(prog="nox -s bench -- distillation", description=about)
    default = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=list(PRESETS), default=default, help="sizes")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each side, after a warm-up")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads of each side (CPU)")
    parser.add_argument("--quick", action="store_true", help="preset tiny and one round, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.preset, options.rounds = "tiny", 1
    return options


def run_sides(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of each side, starting with the warm-up; the order rotates from round to round.

    Raises:
        ChildFailedError: A side failed.
    """
    steps: dict[str, list[dict[str, Any]]] = {OURS: [], FULL: []}
    with tempfile.TemporaryDirectory(prefix="bd-", dir="/tmp") as folder, ExitStack() as stack:
        peers = {side: stack.enter_context(start(side, options, Path(folder))) for side in steps}
        for number in range(options.rounds + 1):
            for side in list(steps)[:: 1 if number % 2 else -1]:
                answer = peers[side].ask({"operation": "step", "seed": number}, timeout_s=STEP_TIMEOUT_S)
                steps[side].append(answer)
            name = f"round {number}" if number else "warm-up"
            speeds = ", ".join(f"{side} {of[-1]['num_tokens'] / of[-1]['step_s']:,.0f}" for side, of in steps.items())
            say(f"{time.strftime('%H:%M:%S')}  {name}: tokens/s {speeds}, loss {steps[OURS][-1]['loss']:.5f}")
    return steps


def start(side: str, options: argparse.Namespace, folder: Path) -> Peer:
    """Start a side and wait until its matrices are loaded."""
    command = [
        sys.executable,
        str(SIDE),
        f"--side={side}",
        f"--preset={options.preset}",
        f"--threads={options.threads}",
    ]
    return Peer(side, command, folder, variables={"OMP_NUM_THREADS": str(options.threads)})


def summarize(
    steps: Mapping[str, list[dict[str, Any]]], options: argparse.Namespace, *, load_before: float
) -> dict[str, Any]:
    """Return the report: a row per side, and their comparison."""
    preset = PRESETS[options.preset]
    rows = {side: result_row(side, of) for side, of in steps.items()}
    pairs = [full["step_s"] / ours["step_s"] for ours, full in zip(steps[OURS][1:], steps[FULL][1:], strict=True)]
    differences = {
        name: max(
            abs(ours[name] - full[name]) / abs(full[name]) for ours, full in zip(steps[OURS], steps[FULL], strict=True)
        )
        for name in ("loss", "grad_norm_hidden", "grad_norm_weight")
    }
    speed = rows[OURS]["tokens_per_s"] / rows[FULL]["tokens_per_s"]
    memory = rows[OURS]["peak_memory_mb"] / max(rows[FULL]["peak_memory_mb"], 1e-9)
    return {
        "benchmark": "distillation",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "preset": options.preset,
        "sizes": preset.as_json(),
        "rounds": options.rounds,
        "threads": options.threads,
        "device": steps[OURS][-1]["device"],
        "environment": {"cores": os.cpu_count(), "torch": torch.__version__, "load_before": load_before},
        "results": list(rows.values()),
        "comparison": {
            "speed": round(speed, 3),
            "speed_of_rounds": [round(pair, 3) for pair in pairs],
            "wanted_speed": LEAST_SPEED,
            "memory": round(memory, 3),
            "wanted_memory": MOST_MEMORY,
            "is_speed_met": speed >= LEAST_SPEED,
            "is_memory_met": memory <= MOST_MEMORY,
            "largest_relative_difference": differences,
            "do_agree": max(differences.values()) <= TOLERANCE[options.preset],
        },
    }


def result_row(side: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a side's numbers: speed of the median step after the warm-up, and maximum memory."""
    timed = steps[1:]
    seconds = statistics.median(step["step_s"] for step in timed)
    return {
        "system": side,
        "workload": WORKLOAD,
        "tokens_per_s": round(timed[0]["num_tokens"] / seconds, 1),
        "peak_memory_mb": round(max(step["peak_bytes"] for step in timed) / 1e6, 1),
        "start_memory_mb": round(max(step["start_bytes"] for step in timed) / 1e6, 1),
        "step_s": [round(step["step_s"], 4) for step in timed],
        "losses": [step["loss"] for step in steps],
    }


def print_report(report: Mapping[str, Any]) -> None:
    """The table."""
    say(f"\n  {'system':14}{'tokens/s':>10}{'peak MB':>10}   (above what was there before the step)")
    for row in report["results"]:
        say(f"  {row['system']:14}{row['tokens_per_s']:>10,.1f}{row['peak_memory_mb']:>10,.0f}")
    of = report["comparison"]
    verdicts = {True: "met", False: "missed"}
    say(
        f"\n  {of['speed']:.2f} times the speed; wanted {of['wanted_speed']:g}: {verdicts[of['is_speed_met']]}\n"
        f"  {of['memory']:.2f} of the memory; wanted {of['wanted_memory']:g}: {verdicts[of['is_memory_met']]}"
    )
    found = ", ".join(f"{name} {value:.1e}" for name, value in of["largest_relative_difference"].items())
    say(f"  the two agree to: {found}")


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
