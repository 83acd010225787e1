"""Compare LoRA in our learner with full training and with peft; measure updates and decoding of the engine.

    nox -s bench -- lora [--rounds 3] [--threads 1] [--workload train,train_recompute,decode] [--quick] [--json FILE]

The systems are processes that take turns, one step each; benchmarks/README.md describes the measurements. --quick runs
one round of a tiny policy with the transformers engine, all in one process.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _children import BENCHMARKS, ChildFailedError, Peer
from _learner_summary import DisagreementError
from _lora_summary import Measured, check_same, comparisons, result_row
from _lora_workload import DECODE, PRESETS, RANKS, SYSTEMS, WORKLOADS

TIMEOUT_S = 600.0


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a system fails or disagrees; targets are reported."""
    options = parse(words)
    if min(options.rounds, options.threads) < 1 or not set(options.workload) <= set(WORKLOADS):
        sys.stderr.write(f"error: numbers must be at least 1, --workload of {', '.join(WORKLOADS)}; found {words}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the systems as Ctrl-C does
    report = new_report(options)
    found: dict[str, dict[str, Measured]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="bo-", dir="/tmp") as folder, ExitStack() as stack:
            one = stack.enter_context(start("all", options, Path(folder)))
            one.ask({"operation": "prepare"}, timeout_s=TIMEOUT_S)
            if not options.quick:
                one.stop()
            for workload in options.workload:
                found[workload] = run_workload(workload, options, Path(folder), shared=one if options.quick else None)
        report["agreement"] = {name: check_same(name, found) for name in options.workload if name != DECODE}
    except (ChildFailedError, DisagreementError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    report["results"] = [result_row(system, name, found) for name, systems in found.items() for system in systems]
    report["comparisons"] = comparisons(found)
    report["versions"] = {
        k: v for systems in found.values() for of in systems.values() for k, v in of.about["versions"].items()
    }
    if options.quick:
        report["comparisons"] = [{**of, "is_met": None} for of in report["comparisons"]]
    report["environment"]["load_after"] = os.getloadavg()[0]
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- lora", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each system, after a warm-up")
    parser.add_argument("--threads", type=int, default=1, help="of each system")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="comma-separated workloads to run")
    parser.add_argument("--quick", action="store_true", help="a tiny policy, one round, no vLLM, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    options.preset = "tiny" if options.quick else "52m"
    options.rounds = 1 if options.quick else options.rounds
    options.workload = options.workload.split(",")
    return options


def new_report(options: argparse.Namespace) -> dict[str, Any]:
    """Return the part of the report that is known before the first step."""
    preset = PRESETS[options.preset]
    return {
        "benchmark": "lora",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "policy": {**preset.policy, "num_parameters": preset.num_parameters, "dtype": preset.dtype},
        "rank": RANKS[options.preset],
        "rounds": options.rounds,
        "threads": options.threads,
        "environment": {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
    }


def run_workload(
    workload: str, options: argparse.Namespace, folder: Path, *, shared: Peer | None
) -> dict[str, Measured]:
    """Run a step of each system in turns with a rotating order; then an update of each engine in turns.

    Args:
        workload: A name in `WORKLOADS`.
        options: The command line.
        folder: Folder with the policy and its adapter.
        shared: Process for all systems; None starts one for each, because their memory is measured.

    Raises:
        ChildFailedError: A system failed.
    """
    found = {system: Measured() for system in SYSTEMS[workload]}
    with ExitStack() as stack:
        peers = {system: shared or stack.enter_context(start(system, options, folder)) for system in found}
        for number in range(options.rounds + 1):
            order = list(found)
            for system in order[number % len(order) :] + order[: number % len(order)]:
                request = {"operation": workload, "system": system, "seed": number}
                found[system].rounds.append(peers[system].ask(request, timeout_s=TIMEOUT_S))
                if workload == DECODE:
                    request = {"operation": "update", "system": system}
                    found[system].updates.append(peers[system].ask(request, timeout_s=TIMEOUT_S))
            tell(workload, number, found)
        for system, of in found.items():
            of.about = peers[system].ask({"operation": "about"}, timeout_s=TIMEOUT_S)
    return found


def start(system: str, options: argparse.Namespace, folder: Path) -> Peer:
    """Start a system's process."""
    script = str(BENCHMARKS / "peers" / "lora_side.py")
    words = [f"--folder={folder}", f"--preset={options.preset}", f"--threads={options.threads}"]
    words += ["--quick"] if options.quick else []
    return Peer(system, [sys.executable, script, *words], folder, variables={"OMP_NUM_THREADS": str(options.threads)})


def tell(workload: str, number: int, found: dict[str, Measured]) -> None:
    """Print one line at the end of a round."""
    name = f"round {number}" if number else "warm-up"
    times = ", ".join(
        f"{system} {of.rounds[-1]['step_s']:.3f} s (processor {of.rounds[-1]['processor_s']:.3f} s)"
        for system, of in found.items()
    )
    say(f"{time.strftime('%H:%M:%S')}  {workload}, {name}: {times}")


def print_report(report: dict[str, Any]) -> None:
    """The tables."""
    names = ("step_s", "processor_s", "peak_memory_mb", "update_ms", "proven_ms", "update_mb")
    say(f"\n  {'workload':17}{'system':13}" + "".join(f"{name:>16}" for name in names))
    for row in report["results"]:
        numbers = "".join(f"{'-' if row[name] is None else format(row[name], ',.3f'):>16}" for name in names)
        say(f"  {row['workload']:17}{row['system']:13}{numbers}")
    say("\ntargets")
    for of in report["comparisons"]:
        verdict = {None: "not judged", True: "met", False: "missed"}[of["is_met"]]
        wanted = "" if of["wanted"] is None else f"; wanted at most {of['wanted']:g}: {verdict}"
        processor = f" (processor {of['processor']:g})" if "processor" in of else ""
        say(f"  {of['workload']}, {of['what']}: {of['found']:g}{processor}{wanted}")
    for workload, found in report["agreement"].items():
        say(
            f"  {workload}: losses agree with peft's to {found['loss']:.1e}, gradient norms to {found['grad_norm']:.1e}"
        )


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
