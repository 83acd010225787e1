"""Compare the skip cache with torch.save of rows and of padded batches, and with verl's rollout dump.

    nox -s bench -- skip-cache [--rounds 12] [--folder DIR] [--quick] [--json FILE]

Each system is a process with the same samples; they take turns, one write and one read each. benchmarks/README.md
describes the measurements. --quick runs one round of few samples, without verl.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _children import BENCHMARKS, LEFT_OUT, ChildFailedError, Peer
from _skip_samples import NUM_GROUPS, make_samples
from _skip_summary import (
    COMPRESSED,
    OURS,
    PADDED,
    ROWS,
    VERL,
    Measured,
    comparisons,
    flushes,
    result_rows,
    targets,
)

PROGRAMS = {
    OURS: ("our_skip_cache.py",),
    COMPRESSED: ("our_skip_cache.py", "--compress"),
    ROWS: ("torch_files.py",),
    PADDED: ("torch_files.py", "--padded"),
    VERL: ("verl_skip.py",),
}
OPTIONAL = (VERL,)
"""Systems that are left out, with the reason, if their environment cannot be created or does not start."""
FLUSHING = (OURS, COMPRESSED)
"""Systems whose writes wait for the disk; writes that do not wait measure the cost."""
QUICK_GROUPS, QUICK_ROUNDS = 4, 1
ANSWER_TIMEOUT_S = 120.0


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a system fails that is not optional."""
    options = parse(words)
    if options.rounds < 1 or (options.folder is not None and not options.folder.is_dir()):
        sys.stderr.write(f"error: --rounds must be at least 1, --folder one that is there; found {words}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the systems as Ctrl-C does
    load_before = os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory(prefix="bench-skip-", dir=options.folder) as folder:
            measured, skipped = run(options, Path(folder))
    except ChildFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    report = new_report(options, measured, skipped)
    report["environment"] |= {"load_before": load_before, "load_after": os.getloadavg()[0]}
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- skip-cache", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds after a warm-up")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one round of few samples, no verl, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    options.groups = QUICK_GROUPS if options.quick else NUM_GROUPS
    options.rounds = QUICK_ROUNDS if options.quick else options.rounds
    return options


def run(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Measured], dict[str, str]]:
    """Return the measurements of each system, and why one was left out.

    Raises:
        ChildFailedError: A required system did not start or could not continue.
    """
    measured: dict[str, Measured] = {}
    skipped = {VERL: LEFT_OUT} if options.quick else {}
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for system in [system for system in PROGRAMS if system not in skipped]:
            with leaving_out(system, skipped):
                peers[system] = stack.enter_context(start(system, options.groups, folder))
                measured[system] = Measured()
        for number in range(options.rounds + 1):
            order = [system for system in peers if system not in skipped]
            first = number % len(order)  # the order rotates from round to round
            for system in [*order[first:], *order[:first]]:
                with leaving_out(system, skipped):
                    take_turn(system, peers[system], measured[system], number)
            say(f"{time.strftime('%H:%M:%S')}  {f'round {number}' if number else 'warm-up'}")
        for system in [system for system in peers if system not in skipped]:
            measured[system].versions = peers[system].ask({"operation": "versions"}, timeout_s=ANSWER_TIMEOUT_S)
    return {system: found for system, found in measured.items() if system not in skipped}, skipped


@contextmanager
def leaving_out(system: str, skipped: dict[str, str]) -> Iterator[None]:
    """Record why an optional system cannot continue."""
    try:
        yield
    except ChildFailedError as error:
        if system not in OPTIONAL:
            raise
        skipped[system] = str(error)
        say(f"{system} is left out: {error}")


def start(system: str, num_groups: int, folder: Path) -> Peer:
    """Start a system and wait until it has the samples.

    Raises:
        ChildFailedError: It did not get ready, or its environment is not there.
    """
    python = os.environ.get("VERL_PYTHON", "") if system == VERL else sys.executable
    if not Path(python).is_file():
        raise ChildFailedError(
            f"VERL_PYTHON must name the python of an environment with verl, which nox makes from locks/verl.txt; found "
            f"{python!r}."
        )
    program, *words = PROGRAMS[system]
    command = [python, str(BENCHMARKS / "peers" / program), *words, f"--folder={folder}", f"--groups={num_groups}"]
    return Peer(system, command, folder)


def take_turn(system: str, peer: Peer, found: Measured, number: int) -> None:
    """Run a write and a read; for ours also a write without waiting for the disk, first in every second round."""
    writes = ["write_unflushed", "write"] if system in FLUSHING else ["write"]
    operations = [*writes[:: 1 if number % 2 else -1], "read"]
    answers = {name: peer.ask({"operation": name}, timeout_s=ANSWER_TIMEOUT_S) for name in operations}
    found.size_bytes = answers["write"]["size_bytes"]
    if number:
        for operation in found.wall_s:
            found.wall_s[operation].append(answers[operation]["wall_s"])
        found.unflushed_s += [answers[name]["wall_s"] for name in writes if name == "write_unflushed"]


def new_report(
    options: argparse.Namespace, measured: Mapping[str, Measured], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of the results file."""
    samples = make_samples(options.groups)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "benchmark": "skip-cache",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "payload": {
            "samples": len(samples.lengths),
            "tokens": int(samples.lengths.sum()),
            "bytes": samples.size_bytes,
            "is_quick": options.quick,
        },
        "rounds": options.rounds,
        "results": result_rows(measured, payload_bytes=samples.size_bytes),
        "comparisons": comparisons(measured),
        "flushes": flushes(measured),
        "targets": targets(measured, payload_bytes=samples.size_bytes, is_judged=not options.quick),
        "skipped": dict(skipped),
        "environment": {
            "cores": os.cpu_count(),
            "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
            "python": platform.python_version(),
            "versions": {system: found.versions for system, found in measured.items()},
        },
    }


def print_report(report: Mapping[str, Any]) -> None:
    """The tables."""
    payload = report["payload"]
    say(
        f"\n{payload['samples']} samples, {payload['bytes'] / 1e6:.1f} MB: input_ids and position_ids int64, logprobs "
        f"float32, mask int8; {report['rounds']} rounds.\nMB/s refer to these bytes, however a system stores them. "
        "Ours stores ids as int32, derives positions and policy\nversions, and waits for the disk; the others do not."
    )
    say(f"  {'system':17}{'operation':11}{'MB/s':>8}{'quartiles':>16}{'best':>8}{'on disk, MB':>14}")
    for row in report["results"]:
        first, third = row["mb_per_s_quartiles"]
        speeds = f"{row['mb_per_s']:>8.0f}{f'{first:.0f} to {third:.0f}':>16}{row['mb_per_s_best']:>8.0f}"
        say(f"  {row['system']:17}{row['operation']:11}{speeds}{row['size_mb']:>14.1f}")
    say("\ntimes as fast, median of the rounds (quartiles)")
    for row in report["comparisons"]:
        first, third = row["ratio_quartiles"]
        name = f"{row['operation']}: {row['system']} over {row['peer']}"
        say(f"  {name:40}{row['ratio']:>8.2f}  ({first:.2f} to {third:.2f})")
    for system, flush in report["flushes"].items():
        say(f"  {system}: {flush['flush_ms']:.1f} ms of a write, {flush['share_of_write']:.0%}, wait for the disk")
    for system, reason in report["skipped"].items():
        say(f"  {system} was left out: {reason.splitlines()[0]}")
    say("\ntargets")
    verdicts = {True: "met", False: "missed", None: "not judged, too few samples"}
    for claim in report["targets"]:
        wanted = f"{claim['relation']} {claim['wanted']:g}"
        say(f"  {claim['target']}: {claim['found']:g}; wanted {wanted}: {verdicts[claim['is_met']]}")


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
