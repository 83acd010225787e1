"""The command line: new, check-machine, train, validate, export."""

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rl_core.terminal_text import use_utf8
from rl_trainer_parts.commands.command_line import (
    USAGE,
    Program,
    export,
    take_file,
    take_flag,
)

if TYPE_CHECKING:
    from rl_metrics.trackers import ConsoleTracker
    from rl_trainer_parts.rollouts.inputs import Inputs
    from rl_trainer_parts.run.folder import RunFolder
    from rl_trainer_parts.settings.schema import Settings

TRAIN = """\
  train SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]
      Train. --resume continues the run in the folder; --dry-run checks everything, prints the plan and exits.
      --best starts from the best checkpoint of the run in policy.path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if arguments is None:
        use_utf8()
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"train": train, "export": export}
    usage = USAGE.format(program="rl-sync-trainer", train=TRAIN, others="")
    return Program(name="rl-sync-trainer", usage=usage, commands=commands, settings=_settings_class).run(words)


def _settings_class() -> "type[Settings]":
    from rl_trainer_parts.settings.schema import Settings

    return Settings


def train(words: list[str]) -> int:
    """`train SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]`."""
    resume, dry_run, best = (take_flag(words, flag) for flag in ("--resume", "--dry-run", "--best"))
    file = take_file(words, "rl-sync-trainer train")
    from rl_trainer_parts.settings.sources import load_settings

    settings = load_settings(file, words, os.environ)
    from rl_trainer_parts.reporting.trackers import make_console

    with closing(make_console(settings)) as console:
        where = f"run {settings.run_folder}, {settings.trainer.steps} steps"
        console.say(f"rl-sync-trainer: {where}; checking settings and files")
        with console.phase("loading libraries", is_brief=True):
            from rl_trainer_parts.commands.plan import describe_plan
            from rl_trainer_parts.commands.policies import with_best_policy
            from rl_trainer_parts.commands.train import train_checked
        if best:
            settings = with_best_policy(settings, console.say)

        async def launch(settings: "Settings", inputs: "Inputs", folder: "RunFolder", console: "ConsoleTracker") -> int:
            with console.phase("loading engine and learner libraries", is_brief=True):
                from rl_sync_trainer.training_run import TrainingRun

            return await TrainingRun(settings, inputs, folder, console).run()

        return train_checked(
            settings, console=console, resume=resume, dry_run=dry_run, describe=describe_plan, launch=launch
        )


if __name__ == "__main__":
    raise SystemExit(main())
