"""`rl-async-trainer simulate`: simulate step times on a virtual clock."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rl_core.errors import DataError, SettingsError
from rl_core.files import read_toml
from rl_metrics.run_files import read_json_lines
from rl_rollout.simulation import (
    MEASURED_METRICS,
    Cluster,
    Outcome,
    Policy,
    Workload,
    advise,
    best_split,
    built_in_workload,
    compare_published,
    measure_workload,
    middle_split,
    outcome_record,
    outcome_table,
    published_record,
    published_table,
    read_workload,
    simulate_async,
    simulate_sync,
    sync_steps,
)
from rl_trainer_parts.commands.output import say

DEFAULT_GPUS = "32,64,128"
WARM_UP = "a version has batch.groups groups, like a synchronous step"


def simulate(words: list[str]) -> int:
    """`simulate [WORKLOAD.toml] [--gpus N,...] [--split R:T | --search] ...`.

    Raises:
        SettingsError: The arguments or the workload are invalid.
    """
    options = _parser().parse_args(words)
    if options.steps < 1:
        raise SettingsError(f"--steps must be at least 1; found {options.steps}.")
    if options.seed < 0:
        raise SettingsError(f"--seed must be at least 0; found {options.seed}.")
    if options.run is None and options.run_gpus is not None:
        raise SettingsError("--run-gpus is the number of GPUs of the run in --from. Name the run, or leave it out.")
    if options.published:
        return _compare(options)
    workload = _workload(options)
    if options.write is not None:
        _write(Path(options.write), workload_text(workload))
    outcomes, advice = _simulate_all(workload, options)
    batch = workload.batch
    say(f"{workload.name}: {batch.groups} x {batch.group_size} responses a step, sync_every {options.sync_every}")
    _show(outcomes)
    for sentence in advice:
        say(sentence)
    if options.json is not None:
        _write(Path(options.json), json.dumps(_record(workload, outcomes, advice, options.seed), indent=2) + "\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Print the published table; its workload, GPUs and schedules are fixed."""
    default = _parser().parse_args([])
    for name, value in vars(options).items():
        if name not in ("published", "steps", "seed", "json") and value != getattr(default, name):
            found = {"workload": "the workload", "run": "--from"}.get(name, f"--{name.replace('_', '-')}")
            raise SettingsError(f"--published simulates the rows of the published table. Leave out {found}.")
    compared = compare_published(num_versions=options.steps, seed=options.seed)
    say(published_table(compared))
    if options.json is not None:
        records = {"seed": options.seed, "results": [published_record(one) for one in compared]}
        _write(Path(options.json), json.dumps(records, indent=2) + "\n")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Treat a mistake on the command line as a settings error, which main reports."""
        raise SettingsError(f"simulate: {message}. See rl-async-trainer simulate --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rl-async-trainer simulate", description="Simulate step times on a virtual clock.", allow_abbrev=False
    )
    parser.add_argument("workload", nargs="?", metavar="WORKLOAD.toml", help="lengths and costs (default: built in)")
    parser.add_argument("--gpus", metavar="N,...", help=f"total numbers of GPUs (default: {DEFAULT_GPUS})")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--split", metavar="ROLLOUT:TRAIN", help="GPUs for generation and training (default: half each)")
    how.add_argument("--search", action="store_true", help="find the best split and a sufficient staleness")
    how.add_argument("--published", action="store_true", help="compare with the published table and exit")
    parser.add_argument("--staleness", default="0,1,2", metavar="S,...", help="max_staleness (default: 0,1,2)")
    parser.add_argument("--sync-every", type=int, default=1, metavar="K", help="learner steps per version (default: 1)")
    parser.add_argument("--partial", choices=("true", "false"), default="true", help="partial_rollout (default: true)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help=f"versions simulated (default: 8); {WARM_UP}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the lengths (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--from", dest="run", metavar="RUN", help="measure the workload in this run's folder")
    parser.add_argument("--run-gpus", metavar="N", help="GPUs of that run, or R:T (default: 1)")
    parser.add_argument("--write", metavar="FILE", help="write the workload to this file, to edit it")
    return parser


def _workload(options: argparse.Namespace) -> Workload:
    if options.run is not None and options.workload is not None:
        raise SettingsError("simulate accepts either a workload or --from RUN; found both.")
    if options.run is not None:
        gpus = options.run_gpus or "1"
        rollout, train = _split(gpus if ":" in gpus else f"{gpus}:{gpus}", "--run-gpus")
        return measure_run(Path(options.run), rollout_gpus=rollout, train_gpus=train)
    return built_in_workload() if options.workload is None else read_workload(Path(options.workload))


def _simulate_all(workload: Workload, options: argparse.Namespace) -> tuple[list[Outcome], list[str]]:
    workload.batch.groups_per_step(options.sync_every)  # raises before the simulation starts
    policies = [
        Policy(max_staleness=staleness, sync_every=options.sync_every, partial_rollout=options.partial == "true")
        for staleness in _whole_numbers(options.staleness, "--staleness", least=0)
    ]
    outcomes: list[Outcome] = []
    advice = []
    clusters = _clusters(workload, options)
    with _progress() as progress:
        task = progress.add_task("simulating", total=len(clusters) * (1 + len(policies)))
        for gpus, cluster in clusters:
            progress.update(task, description=f"simulating {gpus} GPUs")
            sync = simulate_sync(workload, gpus=gpus, num_steps=options.steps, seed=options.seed)
            found = []
            for policy in policies:
                progress.update(task, advance=1, description=f"{gpus} GPUs, max_staleness {policy.max_staleness}")
                found.append(_asynchronous(workload, gpus, cluster, policy, options))
            progress.advance(task)
            outcomes += [sync, *found]
            if options.search:
                advice.append(advise(sync, found))
    return outcomes, advice


def _progress() -> Progress:
    """Return a progress bar on stderr, shown only in a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def _show(outcomes: Sequence[Outcome]) -> None:
    """Print the table; in a terminal, the fastest row for each number of GPUs is green."""
    header, *rows = outcome_table(outcomes).splitlines()
    if not sys.stdout.isatty():
        say("\n".join((header, *rows)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in re.split(" {2,}", header):
        table.add_column(name.replace(" ", "\n"), justify="right" if table.columns else "left", no_wrap=True)
    for row, outcome in zip(rows, outcomes, strict=True):
        fastest = min(one.step_s for one in outcomes if one.cluster.gpus == outcome.cluster.gpus)
        table.add_row(*re.split(" {2,}", row), style="green" if outcome.step_s == fastest else "")
    Console().print(table)


def _asynchronous(
    workload: Workload, gpus: int, cluster: Cluster | None, policy: Policy, options: argparse.Namespace
) -> Outcome:
    if cluster is None:
        return best_split(workload, gpus, policy, num_versions=options.steps, seed=options.seed)
    return simulate_async(workload, cluster, policy, num_versions=options.steps, seed=options.seed)


def _clusters(workload: Workload, options: argparse.Namespace) -> list[tuple[int, Cluster | None]]:
    """Total number of GPUs, and their split; None if the split is searched."""
    if options.split is not None:
        rollout, train = _split(options.split, "--split")
        if options.gpus is not None and options.gpus != str(rollout + train):
            raise SettingsError(f"--split {options.split} has {rollout + train} GPUs, but --gpus is {options.gpus}.")
        return [(rollout + train, Cluster(rollout_gpus=rollout, train_gpus=train))]
    size = workload.engine.gpus
    found: list[tuple[int, Cluster | None]] = []
    for gpus in _whole_numbers(options.gpus or DEFAULT_GPUS, "--gpus", least=2):
        if gpus % size:
            raise SettingsError(f"--gpus must be multiples of engine.gpus = {size}; found {gpus}.")
        found.append((gpus, None if options.search else middle_split(workload, gpus)))
    return found


def _split(text: str, option: str) -> list[int]:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise SettingsError(f"{option} must be two numbers of GPUs such as 64:64; found {text!r}.")
    return [int(part) for part in parts]


def _whole_numbers(text: str, option: str, *, least: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise SettingsError(f"{option} must be integers of at least {least}, such as 1,2; found {text!r}.")
    return [int(part) for part in parts]


def _record(workload: Workload, outcomes: Sequence[Outcome], advice: Sequence[str], seed: int) -> dict[str, Any]:
    sync = sync_steps(outcomes)
    return {
        "workload": workload.name,
        "seed": seed,
        "results": [outcome_record(one, sync_step_s=sync[one.cluster.gpus]) for one in outcomes],
        "advice": list(advice),
    }


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error}.") from error


def measure_run(run: Path, *, rollout_gpus: int, train_gpus: int) -> Workload:
    """Measure the workload of a run of `rl-sync-trainer`, without its first step if it has others.

    Args:
        run: The run's folder.
        rollout_gpus: Number of GPUs that generated.
        train_gpus: Number of GPUs that trained; they may be the same ones.

    Raises:
        SettingsError: The folder has no metrics, or a metric is missing.
    """
    steps, settings = _steps(run / "metrics.jsonl"), _settings(run / "settings.toml")
    return measure_workload(
        steps,
        name=run.resolve().name,
        rollout_gpus=rollout_gpus,
        train_gpus=train_gpus,
        mini_batches=max(1, int(settings.get("trainer", {}).get("minibatches", 1))),
        max_response_tokens=settings.get("rollout", {}).get("max_response_tokens"),
    )


def _steps(file: Path) -> list[dict[str, float]]:
    try:
        lines = list(read_json_lines(file))
    except (OSError, DataError) as error:
        raise SettingsError(f"the metrics {file} cannot be read: {error}.") from error
    steps = [line for line in lines if isinstance(line, dict) and "timing_s/update_actor" in line]
    steps = steps[1:] or steps  # the first step includes warm-up
    missing = [name for name in MEASURED_METRICS if not any(name in step for step in steps)]
    if missing:
        raise SettingsError(
            f"{file} has no step with {', '.join(missing)}. --from needs a run of rl-sync-trainer with at least one "
            "step."
        )
    return steps


def _settings(file: Path) -> dict[str, Any]:
    return read_toml(file, error=SettingsError) if os.path.lexists(file) else {}


def workload_text(workload: Workload) -> str:
    """The workload as TOML, which `read_workload` reads."""

    def present(table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: present(value) if isinstance(value, dict) else value
            for name, value in table.items()
            if value is not None and value != ()
        }

    return tomli_w.dumps(present(asdict(workload)))
