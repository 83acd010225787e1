"""Compare the Megatron learner with transformers on padded batches: same model, weights, tokens and optimizer.

    nox -s bench -- learner [--preset 8m] [--family llama] [--rounds 5] [--threads 1] [--workload equal,ragged]
        [--quick] [--json FILE]

Both sides are processes that take turns, one step each; benchmarks/README.md describes the measurements. On a GPU the
preset is 0.6b, the shape of Qwen3-0.6B in bfloat16. --family llama takes Llama's layers instead. --quick runs one
round of a tiny preset. --control adds transformers with MKL's code path for Intel processors, which MKL does not use on
others.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _children import BENCHMARKS, ChildFailedError, Peer
from _learner_summary import (
    CONTROL,
    OURS,
    OURS_CLASS,
    PEER,
    UNSHARED,
    DisagreementError,
    Measured,
    check_agreement,
    comparison,
    model_flops,
    result_row,
)
from _learner_workload import EXPERTS, FAMILIES, OPTIMIZER, PRESETS, SHARED, WHOLE_GROUPS, WORKLOADS, Preset, make_rows

SIDES = {OURS: "our_learner.py", PEER: "transformers_learner.py", UNSHARED: "our_learner.py"}
SIDES[CONTROL], SIDES[OURS_CLASS] = SIDES[PEER], SIDES[OURS]
STEP_TIMEOUT_S = 600.0


def main(words: Sequence[str]) -> int:
    """Run the comparison and return the exit status: 0 unless a side fails or they disagree; targets are reported."""
    options = parse(words)
    known = {*WORKLOADS, EXPERTS}
    if min(options.rounds, options.threads, options.budget or 1) < 1 or not set(options.workload) <= known:
        names = ", ".join((*WORKLOADS, EXPERTS))
        sys.stderr.write(f"error: numbers must be at least 1, --workload of {names}; found {words}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the sides as Ctrl-C does
    preset = PRESETS[options.preset]
    policy = {**preset.policy, **FAMILIES[options.family]}
    preset = replace(preset, budget=options.budget or preset.budget, policy=policy)
    report = new_report(options, preset)
    say(f"{preset.num_parameters:,} parameters, {preset.dtype}, {options.threads} threads, {options.rounds} rounds")
    try:
        with tempfile.TemporaryDirectory(prefix="bl-", dir="/tmp") as folder:
            write_policy(preset, Path(folder) / "policy")
            # Quick sides serve all workloads; others restart for each, because their memory is measured.
            for workloads in [options.workload] if options.quick else [[name] for name in options.workload]:
                measured, experts = run_workloads(workloads, options, Path(folder))
                for workload, found in measured.items():
                    add_workload(report, workload, preset, found)
                report[EXPERTS] += experts
    except (ChildFailedError, DisagreementError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    report["environment"]["load_after"] = os.getloadavg()[0]
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        say(f"written to {options.json}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    parser = argparse.ArgumentParser(prog="nox -s bench -- learner", description=about)
    default = "0.6b" if torch.cuda.is_available() else "8m"
    workloads = WORKLOADS if torch.cuda.is_available() else (*WORKLOADS, EXPERTS)
    parser.add_argument("--preset", choices=list(PRESETS), default=default, help="size of model and batch")
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen3", help="architecture of the model")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side, after a warm-up")
    parser.add_argument("--threads", type=int, default=1, help="threads of each side, on a CPU")
    parser.add_argument("--budget", type=int, help="maximum tokens of a micro-batch, with padding")
    parser.add_argument("--workload", default=",".join(workloads), help="comma-separated workloads to run")
    parser.add_argument("--control", action="store_true", help="also transformers with MKL's Intel code path")
    parser.add_argument("--quick", action="store_true", help="preset tiny and one round, as a smoke test")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.quick:
        options.preset, options.rounds = "tiny", 1
    options.workload = options.workload.split(",")
    return options


def write_policy(preset: Preset, folder: Path) -> None:
    """Write random weights, the same for both sides."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(**preset.policy)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.to(getattr(torch, preset.dtype))
    model.save_pretrained(folder)


def run_workloads(
    workloads: Sequence[str], options: argparse.Namespace, folder: Path
) -> tuple[dict[str, dict[str, Measured]], list[dict[str, Any]]]:
    """Run a step of each side in turns, for one workload after another; the order rotates from round to round.

    Returns:
        Measurements of each side on each workload, and of experts if selected.

    Raises:
        ChildFailedError: A side failed.
    """
    found = {name: {side: Measured() for side in sides_of(name, options)} for name in workloads if name != EXPERTS}
    experts: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = {side: None for of in found.values() for side in of} or {OURS: None}
        budget = budget_of(workloads, options)
        peers = {side: stack.enter_context(start(side, options, folder, budget=budget)) for side in sides}
        for workload in sorted(found, key=lambda name: name not in SHARED):  # while all sides have run the same steps
            of = found[workload]
            for number in range(options.rounds + 1):
                request = {"operation": "step", "workload": workload, "seed": number}
                for side in list(of)[:: 1 if number % 2 else -1]:
                    of[side].add(peers[side].ask(request, timeout_s=STEP_TIMEOUT_S))
                tell(workload, number, of)
            for side in of:
                of[side].about = peers[side].ask({"operation": "about"}, timeout_s=STEP_TIMEOUT_S)
        if EXPERTS in workloads:
            request = {"operation": EXPERTS, "rounds": options.rounds}
            experts = peers[OURS].ask(request, timeout_s=STEP_TIMEOUT_S)[EXPERTS]
        for workload, of in found.items():  # at the end, because it runs one more step, with a profiler's memory
            if UNSHARED in of and not torch.cuda.is_available():
                request = {"operation": "bound", "workload": workload, "seed": 0}
                of[UNSHARED].bound = peers[UNSHARED].ask(request, timeout_s=STEP_TIMEOUT_S)["bound"]
    return found, experts


def budget_of(workloads: Sequence[str], options: argparse.Namespace) -> int:
    """Return the maximum tokens of a micro-batch, including padding."""
    least: int = PRESETS[options.preset].budget
    of_workload = 0 if options.quick else max(WHOLE_GROUPS.get(name, 0) for name in workloads)
    return options.budget or max(least, of_workload)


def sides_of(workload: str, options: argparse.Namespace) -> list[str]:
    """Return the sides that take turns; with shared prefixes, also our learner computing each row separately."""
    others = [side for side, is_there in ((UNSHARED, workload in SHARED), (CONTROL, options.control)) if is_there]
    return [OURS, PEER, OURS_CLASS, *others]


def start(side: str, options: argparse.Namespace, folder: Path, *, budget: int) -> Peer:
    """Start a side and wait until its model is loaded."""
    command = [
        sys.executable,
        str(BENCHMARKS / "peers" / SIDES[side]),
        f"--policy={folder / 'policy'}",
        f"--preset={options.preset}",
        f"--threads={options.threads}",
        f"--budget={budget}",
    ]
    variables = {
        "OMP_NUM_THREADS": str(options.threads),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # the processes share one GPU
    }
    if side == UNSHARED:
        variables["SHARED_PREFIX_TOKENS"] = "0"
    if side == OURS_CLASS:
        variables["POLICY_BACKEND"] = "transformers"
    if side == CONTROL:
        variables["LD_PRELOAD"] = str(intel_for_mkl(folder))
    return Peer(side, command, folder, variables=variables)


def intel_for_mkl(folder: Path) -> Path:
    """Build a library that makes MKL treat the processor as Intel's; needs a C compiler."""
    library = folder / "intel.so"
    code = b"int mkl_serv_intel_cpu_true(void) { return 1; }"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=code, check=True)
    return library


def tell(workload: str, number: int, found: Mapping[str, Measured]) -> None:
    """Print one line at the end of a round."""
    name = f"round {number}" if number else "warm-up"
    speeds = ", ".join(f"{side} {of.num_tokens / of.step_s[-1]:,.0f} tokens/s" for side, of in found.items())
    say(f"{time.strftime('%H:%M:%S')}  {workload}, {name}: {speeds}, loss {found[OURS].losses[-1]:.5f}")


def new_report(options: argparse.Namespace, preset: Preset) -> dict[str, Any]:
    """Return the part of the report that is known before the first step."""
    return {
        "benchmark": "learner",
        "date": time.strftime("%Y-%m-%d"),
        "is_quick": options.quick,
        "preset": options.preset,
        "policy": {**preset.policy, "num_parameters": preset.num_parameters, "dtype": preset.dtype},
        "optimizer": OPTIMIZER,
        "micro_batch_tokens": preset.budget,
        "rounds": options.rounds,
        "environment": {
            "cores": os.cpu_count(),
            "processor": processor(),
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
        },
        "results": [],
        "comparisons": [],
        EXPERTS: [],
    }


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def add_workload(report: dict[str, Any], workload: str, preset: Preset, found: Mapping[str, Measured]) -> None:
    """Add a workload's results to the report.

    Raises:
        DisagreementError: The sides computed different results.
    """
    lengths = make_rows(preset, workload, seed=0).lengths.tolist()
    sizes = [preset.policy[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim")]
    flops = model_flops(
        num_parameters=preset.num_parameters, lengths=lengths, attention_size=sizes[0] * sizes[1] * sizes[2]
    )
    report["results"] += [result_row(side, workload, of, flops=flops) for side, of in found.items()]
    pairs = [(OURS, side) for side in found if side not in (OURS, OURS_CLASS)]
    pairs += [(OURS_CLASS, side) for side in (OURS, PEER) if OURS_CLASS in found]
    for system, peer in pairs:
        differences = check_agreement(found[system], found[peer], tolerance=preset.tolerance)
        compared = comparison(workload, found[system], found[peer], system=system, peer=peer)
        report["comparisons"].append({**compared, "largest_relative_difference": differences})


def print_report(report: Mapping[str, Any]) -> None:
    """The tables."""
    if report["results"]:
        say(f"\n  {'workload':14}{'system':14}{'tokens/s':>10}{'best':>10}{'peak MB':>10}{'fill':>7}{'MFU':>8}")
    for row in report["results"]:
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.3f}"
        speeds = f"{row['tokens_per_s']:>10,.0f}{row['tokens_per_s_best']:>10,.0f}{row['peak_memory_mb']:>10,.0f}"
        say(f"  {row['workload']:14}{row['system']:14}{speeds}{row['fill']:>7.2f}{mfu:>8}")
    for of in report[EXPERTS]:
        sizes = f"{of['num_experts']} experts of {of['hidden_size']} x {of['ffn_hidden_size']}"
        say(f"\n  {sizes}, {of['num_tokens']} tokens of {of['top_k']} each")
        for way, row in of["ways"].items():
            say(f"  {way:28}{row['ms']:>10,.1f} ms{row['gflops_per_s']:>8,.1f} GF/s")
    say("\ntargets")
    for of in report[EXPERTS]:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in of["ratio_of_rounds"])
        verdict = "met" if of["is_met"] else "missed"
        say(
            f"  experts: {of['ratio']:.3f} times {of['best_other']} (rounds {rounds}), with {of['products']}'s products"
        )
        say(f"    wanted {of['wanted']:g}: {verdict}")
    for of in report["comparisons"]:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in of["ratio_of_rounds"])
        say(f"  {of['workload']}: {of['system']} {of['ratio']:.3f} times {of['peer']} (rounds {rounds})")
        verdict = "" if of["wanted"] is None else f"wanted {of['wanted']:g}: {'met' if of['is_met'] else 'missed'}; "
        say(f"    {verdict}{of['memory_ratio']:.2f} times its peak memory")
        if of["bound"] is not None:
            say(f"    {of['share_of_bound']:.2f} of the bound, {of['bound']:.2f}")
        found = of["largest_relative_difference"]
        say(f"    losses agree to {found['loss']:.1e}, gradient norms to {found['grad_norm']:.1e}")


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
