"""`rl-metrics import`: convert another trainer's files to a run's folder."""

import argparse
from pathlib import Path

from rl_metrics.commands.parts import AddVerb, add_verbs, say
from rl_metrics.importers.run_writer import MAX_NAME, MAX_NAMES, Imported
from rl_metrics.importers.trl import import_trl
from rl_metrics.importers.verl import import_verl
from rl_metrics.trackers.console import plain_text


def add_to(add_verb: AddVerb) -> None:
    """Add the verb."""
    parser = add_verb("import", "convert another trainer's files to a run's folder")
    add_trainer = add_verbs(parser, called="TRAINER")
    verl = add_trainer("verl", "import a verl run from its file logger's JSON lines or console output, and generations")
    verl.add_argument("file", nargs="*", type=Path, metavar="FILE", help="one file per launch of the run, in order")
    verl.add_argument("--rollouts", type=Path, metavar="FOLDER", help="the folder trainer.rollout_data_dir")
    verl.add_argument("--validation", type=Path, metavar="FOLDER", help="the folder trainer.validation_data_dir")
    verl.set_defaults(run=_verl)
    trl = add_trainer("trl", "import a TRL run from trainer_state.json and logged completions")
    trl.add_argument("file", nargs="*", type=Path, metavar="FILE", help="trainer_state.json, or a folder with one")
    trl.add_argument(
        "--completions", type=Path, metavar="FOLDER", help="folder with files like completions_00010.parquet"
    )
    trl.set_defaults(run=_trl)
    for one in (verl, trl):
        one.add_argument(
            "--into", type=Path, required=True, metavar="RUN", help="folder of the run: new, or of an earlier import"
        )


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
        rest = f"; these are the first {MAX_NAMES}" if len(imported.other) == MAX_NAMES else ""
        say(f"kept as other/NAME, because they have no counterpart here: {names}{rest}", limit=MAX_NAMES * MAX_NAME)
    return 0
