"""Compare our gateway with vLLM's API server, and measure its overhead and memory with a scripted engine.

    nox -s bench -- gateway [--model 1m] [--rounds 4] [--placement process] [--sessions 2000] [--quick] [--json FILE]
        [--workload chat_8,chat_64,long_history] [--stream]

The servers take turns, one round each. benchmarks/README.md describes the measurements. --quick runs one round of ours
on the scripted engine, without vLLM.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _children import BENCHMARKS, LEFT_OUT, ChildFailedError, Peer
from _gateway_client import Round, TalkFailedError, talk
from _gateway_workload import CHAT_64, LONG, MODELS, SCRIPTED, WORKLOADS, Workload, write_chat_policy

OURS, SERVER = "ours", "vllm_server"
OPERATION_TIMEOUT_S = 300.0
LAST_TURNS = 5
"""Last turns of a long history, which contain all of it."""
QUICK = Workload(num_sessions=2, num_turns=2, user_tokens=8, max_tokens=8)
QUICK_SESSIONS = 10
MEMORY_TURNS = 10
TARGETS = {
    "scripted turn's overhead, p50 ms": 5.0,
    "scripted turn's overhead, p99 ms": 15.0,
    "matching 30,000 tokens of 40 turns, ms": 10.0,
    "memory of a session beside its tokens, KB": 100.0,
}
"""Most of each."""
LEAST_SPEED = 1.0
"""Minimum ratio of our tokens/s to the server's, with 64 sessions."""


@dataclass(slots=True, kw_only=True)
class Told:
    """Measurements of a system's rounds on a workload.

    Attributes:
        speeds: Tokens per second of each round.
        cpu_ms: Processor time per turn in each round, over all processes of the system.
        turn_ms: Times of turns on the client's clock.
        client_ms: The same without the engine's time.
        service_ms: Times of turns without the engine's, on the gateway's clock.
        last_ms: The same for the last turns of each round.
    """

    speeds: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    turn_ms: list[float] = field(default_factory=list)
    client_ms: list[float] = field(default_factory=list)
    service_ms: list[float] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)

    def add(self, seen: Round, told: dict[str, Any], *, cpu_s: float) -> None:
        """Add a round, with the system's report at the end of its sessions."""
        self.speeds.append(seen.num_tokens / seen.wall_s)
        turns = [1e3 * turn_s for session in seen.turn_s for turn_s in session]
        self.turn_ms += turns
        self.cpu_ms.append(1e3 * cpu_s / len(turns))
        if told:
            engine_ms = (1e3 * turn_s for session in told["engine_s"] for turn_s in session)
            self.client_ms += [turn - engine for turn, engine in zip(turns, engine_ms, strict=True)]
            self.service_ms += told["service_ms"]
            self.last_ms += told["service_ms"][-LAST_TURNS:]


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a system fails; targets are reported."""
    options = parse(words)
    if min(options.rounds, options.sessions) < 1 or not set(options.workload) <= set(WORKLOADS):
        sys.stderr.write(f"error: numbers must be at least 1, --workload of {', '.join(WORKLOADS)}; found {words}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the systems as Ctrl-C does
    report: dict[str, Any] = {
        "benchmark": "gateway",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "model": options.model,
        "placement": options.placement,
        "is_streamed": options.stream,
        "rounds": options.rounds,
        "environment": {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "results": [],
        "comparisons": [],
        "turns": [],
        "skipped": {SERVER: LEFT_OUT} if options.quick else {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="bg-", dir="/tmp") as folder:
            write_chat_policy(options.model, Path(folder) / "policy")
            run_scripted(options, Path(folder), report)
            if not options.quick:
                run_live(options, Path(folder), report)
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
    parser = argparse.ArgumentParser(prog="nox -s bench -- gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="1m", help="size of the policy")
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds of each system, after a warm-up")
    parser.add_argument("--placement", choices=("inline", "process"), default="process", help="of our engine")
    parser.add_argument("--stream", action="store_true", help="have answers streamed")
    parser.add_argument("--sessions", type=int, default=2000, help="open sessions for the measurement of memory")
    parser.add_argument("--workload", help="comma-separated workloads to run; all by default")
    parser.add_argument("--quick", action="store_true", help="one small round, no vLLM, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.sessions, options.workload = 1, QUICK_SESSIONS, CHAT_64
    options.workload = options.workload.split(",") if options.workload else list(WORKLOADS)
    return options


def run_scripted(options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Measure our gateway without a model: its overhead, and the memory of its sessions.

    Raises:
        ChildFailedError: It failed.
    """
    workload, told = QUICK if options.quick else SCRIPTED, Told()
    with start(OURS, "scripted", options, folder) as peer:
        for number in range(options.rounds + 1):
            run = Told() if number == 0 else told
            run_round(peer, workload, run, seed=number)
        tell("scripted", {OURS: told})
        request = {"operation": "memory", "num_sessions": options.sessions, "num_turns": MEMORY_TURNS}
        report["memory"] = peer.ask(request, timeout_s=OPERATION_TIMEOUT_S)
        report["versions"] = {OURS: peer.ask({"operation": "versions"}, timeout_s=OPERATION_TIMEOUT_S)}
    report["scripted"] = {
        "num_sessions": workload.num_sessions,
        "client_p50_ms": quantile(told.client_ms, 0.5),
        "client_p99_ms": quantile(told.client_ms, 0.99),
        "service_p50_ms": quantile(told.service_ms, 0.5),
        "service_p99_ms": quantile(told.service_ms, 0.99),
    }
    if options.quick:
        add_rows(report, CHAT_64, {OURS: told})
    values = (*(report["scripted"][name] for name in ("client_p50_ms", "client_p99_ms")), None)
    found = dict(zip(TARGETS, (*values, report["memory"]["kb_per_session"]), strict=True))
    report["targets"] = [judged(what, found[what], options) for what in TARGETS]


def run_live(options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Measure both servers on the same policy, in turns with a rotating order.

    Raises:
        ChildFailedError: One failed.
    """
    with ExitStack() as stack:
        engine = "vllm" if options.placement == "inline" else "vllm process"
        peers = {name: stack.enter_context(start(name, engine, options, folder)) for name in (OURS, SERVER)}
        for name, peer in peers.items():
            report["versions"][name] = peer.ask({"operation": "versions"}, timeout_s=OPERATION_TIMEOUT_S)
        for workload in options.workload:
            runs = {name: Told() for name in peers}
            asked = replace(WORKLOADS[workload], is_streamed=options.stream)
            for number in range(options.rounds + 1):
                order = [*peers][:: 1 if number % 2 else -1]
                for name in order:
                    run = Told() if number == 0 else runs[name]
                    run_round(peers[name], asked, run, seed=number, is_whole=True)
                if number:
                    tell(f"{workload}, round {number}", runs)
            add_rows(report, workload, runs)
            if workload == LONG:
                row = judged([*TARGETS][2], round(median(runs[OURS].last_ms), 2), options)
                report["targets"][2] = row


def start(system: str, engine: str, options: argparse.Namespace, folder: Path) -> Peer:
    """Start a system and wait until it serves."""
    words = [f"--policy={folder / 'policy'}", f"--model={options.model}"]
    script = "vllm_server.py"
    if system == OURS:
        script, words = "our_gateway.py", [*words, f"--engine={engine}"]
    command = [sys.executable, str(BENCHMARKS / "peers" / script), *words]
    return Peer(f"{system}-{engine}", command, folder, variables={"OMP_NUM_THREADS": "1"})


def run_round(peer: Peer, workload: Workload, run: Told, *, seed: int, is_whole: bool = False) -> None:
    """Run the sessions of a workload; with `is_whole`, check that every answer has its maximum length.

    Raises:
        ChildFailedError: The system failed.
    """
    opened = peer.ask({"operation": "open", "num_sessions": workload.num_sessions}, timeout_s=OPERATION_TIMEOUT_S)
    cpu_s = -cpu_of(peer)
    try:
        seen = talk(opened["url"], opened["keys"], workload, seed=seed)
    except TalkFailedError as error:
        peer.ask({"operation": "versions"}, timeout_s=OPERATION_TIMEOUT_S)  # raises with the reason if it has ended
        raise ChildFailedError(f"{peer.name}: {error}") from error
    cpu_s += cpu_of(peer)
    if is_whole and seen.num_tokens != workload.num_tokens:
        raise ChildFailedError(
            f"{peer.name}: {seen.num_tokens} tokens were sampled; {workload.num_tokens} were asked for"
        )
    run.add(seen, peer.ask({"operation": "close"}, timeout_s=OPERATION_TIMEOUT_S), cpu_s=cpu_s)


def cpu_of(peer: Peer) -> float:
    """Return a system's processor seconds; its processes live as long as it does."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[3]) == peer.pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def add_rows(report: dict[str, Any], workload: str, runs: dict[str, Told]) -> None:
    """Add the results of a workload to the report."""
    for name, told in runs.items():
        row = {"system": name, "workload": workload, "tokens_per_s": round(median(told.speeds), 1)}
        overheads = {f"turn_overhead_p{share}_ms": quantile(told.client_ms, share / 100) for share in (50, 99)}
        report["results"].append({**row, **overheads})
        times = {"turn": told.turn_ms, "service": told.service_ms}
        found = {f"{of}_p{share}_ms": quantile(ms, share / 100) for of, ms in times.items() for share in (50, 99)}
        rounds = [round(speed, 1) for speed in told.speeds]
        found["cpu_ms"] = round(median(told.cpu_ms), 2)
        report["turns"].append({"system": name, "workload": workload, **found, "tokens_per_s_of_rounds": rounds})
    if SERVER in runs:
        ratios = [ours / theirs for ours, theirs in zip(runs[OURS].speeds, runs[SERVER].speeds, strict=True)]
        wanted = LEAST_SPEED if workload == CHAT_64 else None
        report["comparisons"].append(
            {
                "workload": workload,
                "ratio": round(median(ratios), 3),
                "ratio_of_rounds": [round(ratio, 3) for ratio in ratios],
                "wanted": wanted,
                "is_met": None if wanted is None else median(ratios) >= wanted,
            }
        )


def judged(what: str, found: float | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return a target, judged if the measurement is valid for it."""
    is_met = None if found is None or options.quick else found <= TARGETS[what]
    return {"what": what, "found": found, "wanted": TARGETS[what], "is_met": is_met}


def quantile(ms: Sequence[float], share: float) -> float | None:
    """Return the median; None without measurements."""
    return round(float(np.quantile(ms, share)), 2) if ms else None


def tell(what: str, runs: dict[str, Told]) -> None:
    """Print one line at the end of a round."""
    speeds = ", ".join(f"{name} {told.speeds[-1]:,.0f} tokens/s" for name, told in runs.items())
    say(f"{time.strftime('%H:%M:%S')}  {what}: {speeds}")


def print_report(report: dict[str, Any]) -> None:
    """The tables."""
    say(f"\n  {'workload':14}{'system':13}{'tokens/s':>10}{'turn p50':>10}{'cpu ms':>8}{'overhead p50, p99 ms':>22}")
    for row, turns in zip(report["results"], report["turns"], strict=True):
        overheads = ", ".join(shown(row[f"turn_overhead_p{share}_ms"]) for share in (50, 99))
        line = f"  {row['workload']:14}{row['system']:13}{row['tokens_per_s']:>10,.0f}{turns['turn_p50_ms']:>10,.0f}"
        say(f"{line}{turns['cpu_ms']:>8.1f}{overheads:>22}")
    scripted, memory = report["scripted"], report["memory"]
    say(f"\n  scripted engine, {scripted['num_sessions']} sessions: by the gateway's own clock a turn's overhead is ")
    say(f"  {scripted['service_p50_ms']} ms (p50), {scripted['service_p99_ms']} ms (p99)")
    say(f"  {memory['num_sessions']:,} sessions of {memory['num_turns']} turns: {memory['token_kb_per_session']} KB")
    say("  of tokens each")
    say("\ntargets")
    for of in report["comparisons"]:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in of["ratio_of_rounds"])
        say(f"  {of['workload']}: {of['ratio']} times vLLM's server ({rounds}); {verdict(of, 'at least')}")
    for of in report["targets"]:
        say(f"  {of['what']}: {shown(of['found'])}; {verdict(of, 'at most')}")


def verdict(judged_row: dict[str, Any], bound: str) -> str:
    """Met or missed."""
    if judged_row["wanted"] is None:
        return "no target"
    result = {True: "met", False: "missed", None: "not judged"}[judged_row["is_met"]]
    return f"wanted {bound} {judged_row['wanted']:g}: {result}"


def shown(ms: float | None) -> str:
    """Return a number as text, or a dash."""
    return "-" if ms is None else f"{ms:.1f}"


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
