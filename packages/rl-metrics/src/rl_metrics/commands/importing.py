"""`rl-metrics import`: convert another trainer's files to a run's folder."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import Verbs, say
from rl_metrics.importers.naming import MAX_NAME
from rl_metrics.importers.run_writer import MAX_NAMES, Imported
from rl_metrics.importers.trl import import_trl
from rl_metrics.importers.verl import import_verl
from rl_metrics.trackers.text import plain_text


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("import", help="files of another trainer as the folder of a run")
    trainers = Verbs(parser, called="TRAINER")
    verl = trainers.add_parser("verl", help="JSON lines of verl's file logger, its console output, its generations")
    verl.add_argument("file", nargs="*", type=Path, metavar="FILE", help="of the run's launches, in their order")
    verl.add_argument("--rollouts", type=Path, metavar="FOLDER", help="its trainer.rollout_data_dir")
    verl.add_argument("--validation", type=Path, metavar="FOLDER", help="its trainer.validation_data_dir")
    verl.set_defaults(run=_verl)
    trl = trainers.add_parser("trl", help="trainer_state.json of TRL's trainers, and their logged completions")
    trl.add_argument("file", nargs="*", type=Path, metavar="FILE", help="trainer_state.json, or a folder with one")
    trl.add_argument("--completions", type=Path, metavar="FOLDER", help="with completions_00010.parquet and the like")
    trl.set_defaults(run=_trl)
    for one in (verl, trl):
        one.add_argument("--into", type=Path, required=True, metavar="RUN", help="folder of the run: new, or imported")


def _verl(arguments: argparse.Namespace) -> int:
    folders = {"rollouts": arguments.rollouts, "validation": arguments.validation}
    return _say(import_verl(arguments.file, arguments.into, **folders))


def _trl(arguments: argparse.Namespace) -> int:
    return _say(import_trl(arguments.file, arguments.into, completions=arguments.completions))


def _say(imported: Imported) -> int:
    say(
        f"{imported.folder}: {imported.num_rows} rows of metrics, {imported.num_rollouts} trajectories, "
        f"{imported.num_generations} validation samples"
    )
    if imported.other:
        names = ", ".join(plain_text(name, limit=MAX_NAME) for name in imported.other)
        rest = f" and others: these are the first {MAX_NAMES}" if len(imported.other) == MAX_NAMES else ""
        say(f"kept as other/NAME, as they have no meaning here: {names}{rest}", limit=MAX_NAMES * MAX_NAME)
    return 0
