"""Compare the asynchronous and the synchronous trainer on engines and a learner that sleep as long as real ones work.

    nox -s bench -- async [--rounds 2] [--roles process] [--realtime] [--quick] [--json FILE]

The trainers take turns, one run each; benchmarks/README.md describes the timing and the bound. --quick runs a few steps
of short responses in one process.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from _async_summary import BOUND, IDLE, SPEED, mode_row, round_row, verdicts
from _children import BENCHMARKS, LOCAL

FILE = BENCHMARKS / "async.toml"
ROLES = ("inline", "process", "ray")
WORDS = {
    SPEED: "{found:.2f} times the speed of sync ({rounds}); target {wanted:g}",
    IDLE: "the learner idles {found:.3f} of the time ({rounds}); target at most {wanted:g}",
    BOUND: "{found:.3f} of the bound on the speed of any schedule ({rounds}); target {wanted:g}",
}


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a run fails; targets are reported."""
    options = parse(words)
    if options.rounds < 1:
        sys.stderr.write(f"error: --rounds must be at least 1; found {options.rounds}\n")
        return 2
    if options.realtime and not takes_precedence():
        sys.stderr.write("error: --realtime needs permission for real-time priority; run as root\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the roles as Ctrl-C does
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the roles' processes, which import torch
    os.environ.update(LOCAL)
    load = os.getloadavg()[0]
    runs = run_rounds(options)
    report: dict[str, Any] = {
        "benchmark": "async",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "rounds": options.rounds,
        "roles": options.roles,
        "is_realtime": options.realtime,
        "environment": {"cores": os.cpu_count(), "load_before": load},
        "bound_s": round(median(run["bound_s"] for run in runs["async"]), 4),
        "results": [mode_row(mode, rounds) for mode, rounds in runs.items()],
        "verdicts": verdicts(runs["sync"], runs["async"]),
    }
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- async", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each trainer")
    parser.add_argument("--roles", choices=ROLES, default="process", help="where rollouter and learner run")
    parser.add_argument("--realtime", action="store_true", help="run with real-time priority (needs root)")
    parser.add_argument("--quick", action="store_true", help="one short round in one process, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.roles = 1, "inline"
    return options


def takes_precedence() -> bool:
    """Give this process and its children real-time priority; return False without permission.

    Processes that mostly sleep would otherwise measure the machine's other work, which they wait for.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def run_rounds(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run both trainers in turns; return the runs by mode."""
    from _async_runs import MODES, run_mode
    from _async_workload import read_plan, write_quick_file

    from rl_trainer_parts.commands.command_line import configure_logs

    configure_logs()
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="ba-", dir="/tmp") as temporary:
        file = FILE
        if options.quick:
            file = Path(temporary) / FILE.name
            write_quick_file(FILE, file)
        plan, workload = read_plan(file)
        for number in range(options.rounds):
            of_round = replace(plan, seed=plan.seed + number)
            for mode in MODES:
                folder = Path(temporary) / f"{mode}-{number}"
                folder.mkdir()
                found = run_mode(mode, file, of_round, workload, folder=folder, roles=options.roles)
                runs[mode].append(round_row(asdict(found)))
                tell(number, runs[mode][-1])
                shutil.rmtree(folder)
    return runs


def tell(number: int, run: dict[str, Any]) -> None:
    """Print one line at the end of a run."""
    say(
        f"{time.strftime('%H:%M:%S')}  round {number + 1}, {run['mode']}: {run['steps']} steps in "
        f"{run['wall_s']:.1f} s, learner idle {run['idle_learner']:.3f}"
    )


def print_report(report: dict[str, Any]) -> None:
    """The tables."""
    heads = ("wall s", "steps", "s/step", "idle learner", "idle engine", "staleness")
    say("\n  " + f"{'mode':8}" + "".join(f"{head:>14}" for head in heads))
    for row in report["results"]:
        values = (row["wall_s"], row["steps"], row["step_s"], row["idle_learner"], row["idle_engine"])
        cells = [f"{value:>14}" if isinstance(value, int) else f"{value:>14.3f}" for value in values]
        say(f"  {row['mode']:8}" + "".join(cells) + f"{row['staleness_mean']:>14.2f}")
    say(f"\n  bound of async: {report['bound_s']:.2f} s\n\ntargets")
    for one in report["verdicts"]:
        rounds = ", ".join(f"{value:.3g}" for value in one["of_rounds"])
        line = WORDS[one["what"]].format(found=one["found"], wanted=one["wanted"], rounds=rounds)
        say(f"  {line}: {'met' if one['is_met'] else 'missed'}")


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
