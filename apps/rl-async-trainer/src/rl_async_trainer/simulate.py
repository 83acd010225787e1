"""`rl-async-trainer simulate`: simulate step times on a virtual clock."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from rl_core.errors import DataError, SettingsError
from rl_core.files import read_toml
from rl_core.terminal_text import say, table_lines
from rl_metrics.run_files import read_json_lines
from rl_rollout.simulation import (
    GpuSplit,
    Schedule,
    SimulatedRun,
    Workload,
    best_split,
    measure_workload,
    middle_split,
    read_workload,
    simulate_async,
    simulate_sync,
)

DEFAULT_GPUS = "32,64,128"


def simulate(words: list[str]) -> int:
    """`simulate [WORKLOAD.toml] [--gpus N,...] [--split R:T | --search] ...`.

    Raises:
        SettingsError: The arguments or the workload are invalid.
    """
    options = _parser().parse_args(words)
    workload = _workload(options)
    if options.write is not None:
        _write(options.write, workload_text(workload))
    runs = _simulate_all(workload, options)
    sync_step_s = {run.split.gpus: run.step_s for run in runs if run.mode == "sync"}
    batch = workload.batch
    with suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        say(f"{workload.name}: {batch.groups} x {batch.group_size} responses a step, sync_every {options.sync_every}")
        say("\n".join(_table(runs, sync_step_s)))
    if options.json is not None:
        results = [run.record(sync_step_s=sync_step_s[run.split.gpus]) for run in runs]
        record = {"workload": workload.name, "seed": options.seed, "results": results}
        _write(options.json, json.dumps(record, indent=2) + "\n")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Treat a mistake on the command line as a settings error, which main reports."""
        raise SettingsError(f"simulate: {message}. See rl-async-trainer simulate --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rl-async-trainer simulate", description="Simulate step times on a virtual clock.", allow_abbrev=False
    )
    parser.add_argument("workload", nargs="?", type=Path, metavar="WORKLOAD.toml", help="lengths and costs")
    parser.add_argument("--gpus", metavar="N,...", help=f"total numbers of GPUs (default: {DEFAULT_GPUS})")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--split", metavar="ROLLOUT:TRAIN", help="GPUs for generation and training (default: half each)")
    how.add_argument("--search", action="store_true", help="find the fastest split for each staleness")
    parser.add_argument("--staleness", default="0,1,2", metavar="S,...", help="max_staleness (default: 0,1,2)")
    parser.add_argument("--sync-every", type=int, default=1, metavar="K", help="learner steps per version (default: 1)")
    parser.add_argument("--partial", choices=("true", "false"), default="true", help="partial_rollout (default: true)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="versions simulated (default: 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the lengths (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--from", dest="run", type=Path, metavar="RUN", help="measure the workload in this run's folder"
    )
    parser.add_argument("--run-gpus", metavar="N", help="GPUs of that run, or R:T (default: 1)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the workload to this file, to edit it")
    return parser


def _workload(options: argparse.Namespace) -> Workload:
    for name, least in (("steps", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise SettingsError(f"--{name} must be at least {least}; found {getattr(options, name)}.")
    if options.run is None:
        if options.run_gpus is not None:
            raise SettingsError("--run-gpus is the number of GPUs of the run in --from. Name the run, or leave it out.")
        return read_workload() if options.workload is None else read_workload(options.workload)
    if options.workload is not None:
        raise SettingsError("simulate accepts either a workload or --from RUN; found both.")
    gpus = options.run_gpus or "1"
    rollout, train = _split(gpus if ":" in gpus else f"{gpus}:{gpus}", "--run-gpus")
    return measure_run(options.run, rollout_gpus=rollout, train_gpus=train)


def _simulate_all(workload: Workload, options: argparse.Namespace) -> list[SimulatedRun]:
    workload.batch.groups_per_step(options.sync_every)  # raises before the simulation starts
    how: dict[str, Any] = {"num_versions": options.steps, "seed": options.seed}
    schedules = [
        Schedule(max_staleness=staleness, sync_every=options.sync_every, partial_rollout=options.partial == "true")
        for staleness in _whole_numbers(options.staleness, "--staleness", least=0)
    ]
    runs: list[SimulatedRun] = []
    for gpus, split in _splits(workload, options).items():
        runs.append(simulate_sync(workload, gpus=gpus, num_steps=options.steps, seed=options.seed))
        for schedule in schedules:
            if split is None:
                runs.append(best_split(workload, gpus, schedule, **how))
            else:
                runs.append(simulate_async(workload, split, schedule, **how))
    return runs


def _table(runs: Sequence[SimulatedRun], sync_step_s: Mapping[int, float]) -> Iterator[str]:
    rows = [
        {
            "mode": run.mode,
            "GPUs": str(run.split.gpus),
            "split": str(run.split),
            "staleness": str(run.max_staleness),
            "step s": f"{run.step_s:.4g}",
            "x sync": f"{sync_step_s[run.split.gpus] / run.step_s:.2f}",
            "idle learner": f"{100 * run.idle_learner:.1f} %",
            "idle engines": f"{100 * run.idle_engine:.1f} %",
            "mean staleness": f"{run.staleness_mean:.2f}",
            "of the bound": f"{run.share_of_bound:.2f}",
        }
        for run in runs
    ]
    columns = list(rows[0])
    return table_lines(columns, [list(row.values()) for row in rows], right=columns[1:])


def _splits(workload: Workload, options: argparse.Namespace) -> dict[int, GpuSplit | None]:
    """The split of each total number of GPUs; None if it is searched."""
    if options.split is not None:
        rollout, train = _split(options.split, "--split")
        if options.gpus is not None and options.gpus != str(rollout + train):
            raise SettingsError(f"--split {options.split} has {rollout + train} GPUs, but --gpus is {options.gpus}.")
        return {rollout + train: GpuSplit(rollout_gpus=rollout, train_gpus=train)}
    sizes, of_engine = _whole_numbers(options.gpus or DEFAULT_GPUS, "--gpus", least=2), workload.engine.gpus
    if others := [gpus for gpus in sizes if gpus % of_engine]:
        raise SettingsError(f"--gpus must be multiples of engine.gpus = {of_engine}; found {others[0]}.")
    return {gpus: None if options.search else middle_split(workload, gpus) for gpus in sizes}


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
    file, settings_file = run / "metrics.jsonl", run / "settings.toml"
    try:
        steps = [line for line in read_json_lines(file) if "timing_s/update_actor" in line]
    except (OSError, DataError) as error:
        raise SettingsError(f"the metrics {file} cannot be read: {error}.") from error
    settings = read_toml(settings_file, error=SettingsError) if os.path.lexists(settings_file) else {}
    return measure_workload(
        steps[1:] or steps,  # the first step includes warm-up
        name=run.resolve().name,
        rollout_gpus=rollout_gpus,
        train_gpus=train_gpus,
        mini_batches=max(1, int(settings.get("trainer", {}).get("minibatches", 1))),
        max_response_tokens=settings.get("rollout", {}).get("max_response_tokens"),
    )


def workload_text(workload: Workload) -> str:
    """The workload as TOML, which `read_workload` reads."""
    return tomli_w.dumps(asdict(workload, dict_factory=_present))


def _present(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table without the values that TOML cannot express or that mean nothing."""
    return {name: value for name, value in fields if value not in (None, ())}
