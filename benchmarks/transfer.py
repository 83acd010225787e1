"""Compare the transfer queue with TransferQueue 0.1.11 and plain Ray: the same samples, producers and consumer.

    nox -s bench -- transfer [--rounds 3] [--systems memory,shm,ray,transferqueue,plain_ray] [--quick]
        [--json FILE]

The systems take turns in each round, so that a slow minute of the machine affects all. Each is started for its turn and
ended after it, because an idle Ray uses part of a core. benchmarks/README.md describes the measurements.
--quick makes few calls of the queue in memory and in shared memory.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _children import LEFT_OUT, ChildFailedError, Peer
from _payload import NUM_PRODUCERS, NUM_SAMPLES, payload_bytes
from _transfer_peers import SYSTEMS, start
from _transfer_summary import Measured, system_rows, targets

LEASE_ROWS = 64
ANSWER_TIMEOUT_S = 150.0
LEASE_TIMEOUT_S = 300.0
COPIES_PER_ROUND = 5
QUICK_SYSTEMS = ("memory", "shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Number of operations to measure.

    Attributes:
        bulks: Bulk puts and gets per round.
        smalls: Small puts, and small gets, per round.
        leases: Calls with each number of rows held.
        held_rows: Rows held, by the operation's name.
    """

    bulks: int
    smalls: int
    leases: int
    held_rows: Mapping[str, int]


FULL = Calls(bulks=8, smalls=800, leases=100, held_rows={"lease_10k": 10_000, "lease_1m": 1_000_000})
QUICK = Calls(bulks=1, smalls=16, leases=2, held_rows={"lease_10k": 200, "lease_1m": 2_000})


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a system fails; targets are reported."""
    options = parse(words)
    unknown = sorted(set(options.systems) - set(SYSTEMS))
    if unknown or options.rounds < 1:
        sys.stderr.write(f"error: --systems are of {', '.join(SYSTEMS)}, --rounds at least 1; found {words}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the systems as Ctrl-C does
    measured = {system: Measured() for system in options.systems}
    environment = machine()
    calls = QUICK if options.quick else FULL
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp")))  # short, for sockets
        copies = copy_speeds()
        for number in range(options.rounds):
            copies += copy_speeds()
            for system in [system for system in options.systems if measured[system].failure is None]:
                one_turn(system, measured[system], folder, calls=calls, is_last=number == options.rounds - 1)
    report = {
        **new_report(measured, copies, {**environment, "rounds": options.rounds, "load_after": os.getloadavg()[0]}),
        "is_quick": options.quick,
        "skipped": {system: LEFT_OUT for system in SYSTEMS if system not in measured} if options.quick else {},
    }
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 1 if report["failures"] else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    parser = argparse.ArgumentParser(prog="nox -s bench -- transfer", description=about)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which all systems take turns")
    parser.add_argument(
        "--systems", type=lambda text: text.split(","), default=list(SYSTEMS), help="comma-separated systems to run"
    )
    parser.add_argument("--quick", action="store_true", help="one round of few calls, of two systems, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.systems = 1, list(QUICK_SYSTEMS)
    return options


def one_turn(system: str, found: Measured, folder: Path, *, calls: Calls, is_last: bool) -> None:
    """Start a system, measure it alone, and end it; single measurements are made in the last round."""
    started = time.monotonic()
    try:
        with start(system, folder) as peer:
            say(f"{time.strftime('%H:%M:%S')}  {system}: warm after {time.monotonic() - started:.0f} s")
            for _ in range(calls.bulks):
                answer = peer.ask({"operation": "bulk"}, timeout_s=ANSWER_TIMEOUT_S)
                found.bulk_s["put"].append(answer["put_s"])
                found.bulk_s["get"].append(answer["get_s"])
                found.ack_ms += [answer["ack_s"] * 1_000] if "ack_s" in answer else []
            answer = peer.ask({"operation": "small", "num_calls": calls.smalls}, timeout_s=ANSWER_TIMEOUT_S)
            found.call_ms["small_put"] += answer["put_ms"]
            found.call_ms["small_get"] += answer["get_ms"]
            found.small_ack_ms += answer.get("ack_ms", [])
            if is_last:
                finish(peer, found, calls)
    except ChildFailedError as error:
        fail(system, found, error)


def finish(peer: Peer, found: Measured, calls: Calls) -> None:
    """Make the single measurements: memory and versions, then leases."""
    found.memory = peer.ask({"operation": "memory"}, timeout_s=ANSWER_TIMEOUT_S)
    found.versions = peer.ask({"operation": "versions"}, timeout_s=ANSWER_TIMEOUT_S)
    for operation, num_rows in calls.held_rows.items():
        request = {"operation": "lease", "num_rows": num_rows, "batch_rows": LEASE_ROWS, "num_calls": calls.leases}
        answer = peer.ask(request, timeout_s=LEASE_TIMEOUT_S)
        found.call_ms[operation] += answer.get("lease_ms", [])
        found.reasons[operation] = answer.get("reason", "")


def fail(system: str, found: Measured, error: ChildFailedError) -> None:
    """Record why a system cannot continue."""
    found.failure = str(error)
    sys.stderr.write(f"error: {system}: {error}\n")


def copy_speeds() -> list[float]:
    """Measure the MB/s of copying as many bytes as the payload, into memory that was touched before."""
    source = np.ones(payload_bytes(), dtype=np.uint8)
    copy = source.copy()
    speeds = []
    for _ in range(COPIES_PER_ROUND):
        started = time.perf_counter()
        np.copyto(copy, source)
        speeds.append(source.nbytes / (time.perf_counter() - started) / 1e6)
    return speeds


def machine() -> dict[str, Any]:
    """Return the facts that the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "processor": names[0] if names else "",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def new_report(
    measured: Mapping[str, Measured], copies: Sequence[float], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of the results file."""
    results = []
    for system, found in measured.items():
        results += system_rows(
            system,
            found,
            payload_bytes=payload_bytes(),
            num_samples=NUM_SAMPLES,
            num_clients=NUM_PRODUCERS,
            lease_rows=LEASE_ROWS,
        )
    memory = {system: found.memory for system, found in measured.items() if found.memory is not None}
    return {
        "benchmark": "transfer",
        "payload": {"bytes": payload_bytes(), "samples": NUM_SAMPLES, "producers": NUM_PRODUCERS},
        "results": results,
        "memcpy_mb_per_s": round(max(copies), 1),
        "memcpy_mb_per_s_median": round(statistics.median(copies), 1),
        "peak_memory": memory,
        "environment": {**environment, "versions": {system: found.versions for system, found in measured.items()}},
        "targets": targets(results, memcpy_mb_per_s=max(copies), memory=memory),
        "failures": {system: found.failure for system, found in measured.items() if found.failure},
    }


def print_report(report: Mapping[str, Any]) -> None:
    """The tables."""
    payload = report["payload"]
    say(
        f"\n{payload['samples']} samples, {payload['bytes'] / 1e6:.1f} MB, {payload['producers']} producers, 1 consumer"
    )
    say(f"memcpy: {report['memcpy_mb_per_s']:.0f} MB/s at best, median {report['memcpy_mb_per_s_median']:.0f}")
    say(f"  {'system':15}{'operation':11}{'MB/s':>8}{'median':>8}{'samples/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
    for row in report["results"]:
        speeds = f"{cell(row['mb_per_s'], 0):>8}{cell(row['mb_per_s_median'], 0):>8}{cell(row['samples_per_s'], 0):>12}"
        times = f"{cell(row['p50_ms'], 3):>9}{cell(row['p99_ms'], 3):>9}"
        say(f"  {row['system']:15}{row['operation']:11}{speeds}{times}  {row.get('reason', '')[:60]}".rstrip())
    for system, held in report["peak_memory"].items():
        say(f"  {system} held {held['peak_bytes'] / 1e6:.1f} MB at most, for {held['payload_bytes'] / 1e6:.1f} MB")
    say("\ntargets")
    verdicts = {True: "met", False: "missed", None: "not measured"}
    for claim in report["targets"]:
        wanted = f"{claim['relation']} {claim['wanted']:g}"
        say(f"  {claim['target']}: {cell(claim['found'], 3)}; wanted {wanted}: {verdicts[claim['is_met']]}")


def cell(number: float | None, digits: int) -> str:
    """Return a number as text, or a dash."""
    return "-" if number is None else f"{number:.{digits}f}"


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
