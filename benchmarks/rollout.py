"""Compare our agent loop on vLLM with vLLM's and transformers' own generate, and weight updates with a copy.

    nox -s bench -- rollout [--preset 6m] [--rounds 5] [--threads 1] [--quick] [--json FILE]
        [--workload equal,ragged,weight_update,experts]

The systems are processes that take turns, one batch each; `experts` compares a mixture whose engine reports its experts
with one whose engine does not. benchmarks/README.md describes the measurements. --quick runs one round of a tiny preset
on the reference engine, without vLLM.
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
from statistics import median
from typing import Any

from _children import BENCHMARKS, LEFT_OUT, ChildFailedError, Peer
from _rollout_workload import EXPERTS, PRESETS, RAGGED, UPDATE, UPDATE_PRESETS, WORKLOADS, write_policy

OURS, VLLM, TRANSFORMERS, COPY, UNTOLD = "ours", "vllm", "transformers", "copy", "without experts"
SYSTEMS = {OURS: "our_rollout.py", VLLM: "vllm_rollout.py", TRANSFORMERS: "transformers_rollout.py"}
MIXTURE_SYSTEMS = {OURS: SYSTEMS[OURS], UNTOLD: SYSTEMS[OURS]}
OPERATION_TIMEOUT_S = 600.0
TARGETS = {("equal", VLLM): 0.95, ("ragged", VLLM): 0.95, ("ragged", TRANSFORMERS): 1.0, (EXPERTS, UNTOLD): 0.97}
"""Minimum ratio of our tokens/s to another system's."""
UPDATE_TIMES = {OURS: "ours_s", COPY: "copy_s"}
WARM_UPS = 3
"""Updates until the allocator has enough memory."""
MOST_COPIES = 3.0
"""Maximum time of a weight update, in units of plain copies of its bytes."""


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a system fails; targets are reported."""
    options = parse(words)
    if min(options.rounds, options.threads) < 1 or not set(options.workload) <= set(WORKLOADS):
        sys.stderr.write(f"error: numbers must be at least 1, --workload of {', '.join(WORKLOADS)}; found {words}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the systems as Ctrl-C does
    report: dict[str, Any] = {
        "benchmark": "rollout",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "preset": options.preset,
        "rounds": options.rounds,
        "threads": options.threads,
        "environment": {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "results": [],
        "comparisons": [],
        "skipped": {VLLM: LEFT_OUT} if options.quick else {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="br-", dir="/tmp") as folder:
            for workload in [name for name in options.workload if name != UPDATE]:
                run_workload(workload, options, Path(folder), report)
            if UPDATE in options.workload and not options.quick:
                run_updates(options, Path(folder), report)
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
    parser = argparse.ArgumentParser(prog="nox -s bench -- rollout", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=list(UPDATE_PRESETS), default="6m", help="size of policy and batch")
    parser.add_argument("--rounds", type=int, default=5, help="timed batches of each system, after a warm-up")
    parser.add_argument("--threads", type=int, default=1, help="of each system")
    parser.add_argument("--workload", help="comma-separated workloads to run; all unless quick")
    parser.add_argument("--quick", action="store_true", help="preset tiny, one round, no vLLM, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.preset, options.rounds, options.workload = "tiny", 1, f"{RAGGED},{UPDATE}"
    options.workload = options.workload.split(",") if options.workload else list(WORKLOADS)
    return options


def run_workload(workload: str, options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Run a batch of each system in turns with a rotating order. A quick run adds our weight updates.

    Raises:
        ChildFailedError: A system failed.
    """
    systems = MIXTURE_SYSTEMS if workload == EXPERTS else SYSTEMS
    speeds: dict[str, list[tuple[float, int]]] = {system: [] for system in systems if system not in report["skipped"]}
    write_policy(PRESETS[options.preset], workload, folder / workload)
    with ExitStack() as stack:
        peers = {
            system: stack.enter_context(start(system, folder / workload, options.preset, options)) for system in speeds
        }
        for number in range(options.rounds + 1):
            order = list(speeds)
            for system in order[number % len(order) :] + order[: number % len(order)]:
                request = {"operation": "generate", "seed": number}
                answer = peers[system].ask(request, timeout_s=OPERATION_TIMEOUT_S)
                speeds[system].append((answer["wall_s"], answer["num_tokens"]))
            tell(workload, number, {system: of[-1] for system, of in speeds.items()})
        report["versions"] = peers[OURS].ask({"operation": "versions"}, timeout_s=OPERATION_TIMEOUT_S)
        updates = ask_updates(peers[OURS], options.rounds) if options.quick else []
    for system, rounds in speeds.items():
        report["results"].append(generation_row(system, workload, rounds[1:]))
    for (of, peer), wanted in TARGETS.items():
        if of == workload and peer in speeds:
            report["comparisons"].append(compared(workload, peer, speeds[OURS][1:], speeds[peer][1:], wanted))
    if updates:
        add_updates(report, updates)


def run_updates(options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Update our engine's weights and copy them, in turns.

    Raises:
        ChildFailedError: The engine failed.
    """
    preset = UPDATE_PRESETS[options.preset]
    write_policy(PRESETS[preset], UPDATE, folder / UPDATE)
    with start(OURS, folder / UPDATE, preset, options) as peer:
        add_updates(report, ask_updates(peer, options.rounds))


def ask_updates(peer: Peer, rounds: int) -> list[dict[str, float]]:
    """Return the times of each round's updates, without the warm-up.

    Raises:
        ChildFailedError: The engine failed.
    """
    updates = []
    for number in range(rounds + WARM_UPS):
        updates.append(peer.ask({"operation": "update"}, timeout_s=OPERATION_TIMEOUT_S))
        name = "warm-up" if number < WARM_UPS else f"round {number - WARM_UPS + 1}"
        times = ", ".join(f"{what} {updates[-1][key] * 1e3:,.0f} ms" for what, key in UPDATE_TIMES.items())
        say(f"{time.strftime('%H:%M:%S')}  {UPDATE}, {name}: {times}")
    return updates[WARM_UPS:]


def start(system: str, policy: Path, preset: str, options: argparse.Namespace) -> Peer:
    """Start a system and wait until its model is loaded."""
    script = str(BENCHMARKS / "peers" / (SYSTEMS | MIXTURE_SYSTEMS)[system])
    words = [f"--policy={policy}", f"--preset={preset}", f"--threads={options.threads}"]
    words += ["--engine=transformers"] if options.quick else []
    words += ["--engine=vllm without experts"] if system == UNTOLD else []
    variables = {"OMP_NUM_THREADS": str(options.threads)}
    return Peer(system, [sys.executable, script, *words], policy.parent, variables=variables)


def generation_row(system: str, workload: str, rounds: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Return a system's result, the median of its rounds."""
    return {
        "system": system,
        "workload": workload,
        "tokens_per_s": round(median(tokens / wall_s for wall_s, tokens in rounds), 1),
        "wall_s": round(median(wall_s for wall_s, _ in rounds), 4),
        "rounds": [{"wall_s": round(wall_s, 4), "num_tokens": tokens} for wall_s, tokens in rounds],
    }


def compared(
    workload: str, peer: str, ours: Sequence[tuple[float, int]], theirs: Sequence[tuple[float, int]], wanted: float
) -> dict[str, Any]:
    """Return our speed over another system's: the median of the rounds' ratios."""
    ratios = [
        (own_tokens / own_s) / (tokens / wall_s)
        for (own_s, own_tokens), (wall_s, tokens) in zip(ours, theirs, strict=True)
    ]
    ratio = median(ratios)
    return {
        "workload": workload,
        "peer": peer,
        "ratio": round(ratio, 3),
        "ratio_of_rounds": [round(one, 3) for one in ratios],
        "wanted": wanted,
        "is_met": ratio >= wanted,
    }


def add_updates(report: dict[str, Any], updates: Sequence[dict[str, float]]) -> None:
    """Add the weight updates and the copies to the report."""
    for system, name in UPDATE_TIMES.items():
        wall_s = median(of[name] for of in updates)
        row = {"system": system, "workload": UPDATE, "tokens_per_s": None, "wall_s": round(wall_s, 6)}
        report["results"].append({**row, "num_bytes": updates[0]["num_bytes"]})
    report["results"][-1]["wall_s_in_place"] = round(median(of["copy_in_place_s"] for of in updates), 6)
    ratios = [of["ours_s"] / of["copy_s"] for of in updates]
    report["comparisons"].append(
        {
            "workload": UPDATE,
            "peer": COPY,
            "ratio": round(median(ratios), 2),
            "ratio_of_rounds": [round(one, 2) for one in ratios],
            "wanted": MOST_COPIES,
            "is_met": median(ratios) <= MOST_COPIES,
        }
    )


def tell(workload: str, number: int, found: dict[str, tuple[float, int]]) -> None:
    """Print one line at the end of a round."""
    name = f"round {number}" if number else "warm-up"
    speeds = ", ".join(f"{system} {tokens / wall_s:,.0f} tokens/s" for system, (wall_s, tokens) in found.items())
    say(f"{time.strftime('%H:%M:%S')}  {workload}, {name}: {speeds}")


def print_report(report: dict[str, Any]) -> None:
    """The tables."""
    say(f"\n  {'workload':15}{'system':14}{'tokens/s':>10}{'wall s':>10}")
    for row in report["results"]:
        speed = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        say(f"  {row['workload']:15}{row['system']:14}{speed:>10}{row['wall_s']:>10.3f}")
    say("\ntargets")
    for of in report["comparisons"]:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in of["ratio_of_rounds"])
        what = "the time" if of["workload"] == UPDATE else "the speed"
        verdict = "met" if of["is_met"] else "missed"
        say(
            f"  {of['workload']}: {of['ratio']} times {what} of {of['peer']} ({rounds}); "
            f"wanted {of['wanted']}: {verdict}"
        )


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
