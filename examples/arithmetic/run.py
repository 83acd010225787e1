"""Prepare the arithmetic example if necessary, then train it; `nox -s train` runs this.

    python examples/arithmetic/run.py [--async] [--seeds 0,1,2] [any option of `train`]

`--async` trains with `rl-async-trainer` and async.toml instead of `rl-sync-trainer` and settings.toml.
`--seeds` trains once for each seed, in runs/arithmetic/seed_N, and writes the means to runs/arithmetic/summary.json.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prepare

from rl_async_trainer.settings import AsyncSettings
from rl_core.errors import SettingsError
from rl_trainer_parts.checks.all_checks import check_values
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import load_settings

FOLDER = Path(__file__).parent
RUNS = Path("runs")


@dataclass(frozen=True)
class Trainer:
    """A trainer: its module, settings file and settings class."""

    module: str
    file: Path
    kind: type[Settings]


SYNC = Trainer(module="rl_sync_trainer.main", file=FOLDER / "settings.toml", kind=Settings)
ASYNC = Trainer(module="rl_async_trainer.main", file=FOLDER / "async.toml", kind=AsyncSettings)
AVERAGED = (
    "steps",
    "wall_s",
    "samples_per_s",
    "validation_mean_reward_first",
    "validation_mean_reward_last",
    "test_mean_reward_first",
    "test_mean_reward_last",
)


def main(arguments: Sequence[str]) -> int:
    """Run the example and return its exit status."""
    words = list(arguments)
    trainer = ASYNC if "--async" in words else SYNC
    words = [word for word in words if word != "--async"]
    seeds = take_seeds(words)
    if {"--help", "-h"} & {*words}:
        print(__doc__)  # the trainer's help follows
        seeds = None
    elif not prepare.is_prepared():
        refuse_mistakes(trainer, words)
        try:
            prepare.prepare()
        except KeyboardInterrupt:
            print("arithmetic: stopped while preparing; the next run prepares again", flush=True)
            return 130
    if seeds is None:
        sys.stdout.flush()
        os.execv(sys.executable, command(trainer, words))
    for seed in seeds:
        print(f"arithmetic: seed {seed}", flush=True)
        place = [f"--run.directory={RUNS / 'arithmetic'}", f"--run.name=seed_{seed}", f"--run.seed={seed}"]
        status = call(command(trainer, [*place, *words]))
        if status:
            return status
    report(seeds)
    return 0


def refuse_mistakes(trainer: Trainer, words: Sequence[str]) -> None:
    """Exit with status 2 if a setting is wrong, before the preparation, which takes minutes."""
    try:
        of_settings = [word for word in words if word not in ("--resume", "--dry-run")]
        check_values(load_settings(trainer.file, of_settings, kind=trainer.kind))
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def command(trainer: Trainer, words: Sequence[str]) -> list[str]:
    """Return the command line of a training run."""
    return [sys.executable, "-m", trainer.module, "train", str(trainer.file), *words]


def call(words: Sequence[str]) -> int:
    """Run a command to its end. It also receives Ctrl-C and SIGTERM, and decides how to stop."""
    process = subprocess.Popen(words)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()  # no deadline: the user decides how long a run trains
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def take_seeds(words: list[str]) -> list[int] | None:
    """Remove `--seeds 0,1,2` or `--seeds=0,1,2` and return the seeds."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--seeds":
            count = 1 if equals else 2
            text = value if equals else "".join(words[index + 1 : index + 2])
            del words[index : index + count]
            if any(other.startswith(("--run.directory", "--run.name", "--run.seed")) for other in words):
                sys.exit("error: --seeds sets the folder, name and seed of its runs. Leave out --run.*.")
            try:
                return [int(seed) for seed in text.split(",")]
            except ValueError:
                sys.exit(f"error: --seeds must be integers such as 0,1,2; found {text!r}.")
    return None


def report(seeds: Sequence[int]) -> None:
    """Print a table of the seeds and write their means."""
    folder = RUNS / "arithmetic"
    summaries = [json.loads((folder / f"seed_{seed}" / "summary.json").read_text()) for seed in seeds]
    means = {name: sum(summary[name] for summary in summaries) / len(summaries) for name in AVERAGED}
    print(f"\n{'seed':>5} {'steps':>6} {'wall_s':>7} {'samples/s':>10} {'test before':>12} {'test after':>11}")
    for label, summary in [*((str(seed), s) for seed, s in zip(seeds, summaries, strict=True)), ("mean", means)]:
        print(row(label, summary))
    summary = {**means, "steps": summaries[0]["steps"], "seeds": list(seeds), "runs": summaries}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"written to {folder / 'summary.json'}")


def row(label: str, summary: Mapping[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"{label:>5} {summary['steps']:>6.0f} {summary['wall_s']:>7.1f} {summary['samples_per_s']:>10.1f} "
        f"{summary['test_mean_reward_first']:>12.3f} {summary['test_mean_reward_last']:>11.3f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
