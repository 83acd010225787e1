"""The command line: new, check-machine, check-model, train, validate, export."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_trainer_parts.commands.command_line import USAGE, run_program, train_command

if TYPE_CHECKING:
    from rl_metrics.trackers import ConsoleTracker
    from rl_trainer_parts.rollouts.inputs import Inputs
    from rl_trainer_parts.run.folder import RunFolder
    from rl_trainer_parts.settings.schema import Settings

NAME = "rl-sync-trainer"
TRAIN = """\
  train SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]
      Train. --resume continues the run in the folder; --dry-run checks everything, prints the plan and exits.
      --best starts from the best checkpoint of the run in policy.path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    usage = USAGE.format(program=NAME, train=TRAIN, others="")
    return run_program(arguments, name=NAME, usage=usage, commands={"train": train}, settings=_settings_class)


def _settings_class() -> "type[Settings]":
    from rl_trainer_parts.settings.schema import Settings

    return Settings


def train(words: list[str]) -> int:
    """`train SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]`."""
    return train_command(words, program=NAME, kind=_settings_class(), trainer=_trainer)


def _trainer(_: "Settings") -> dict[str, Any]:
    from rl_trainer_parts.commands.plan import describe_plan

    async def launch(settings: "Settings", inputs: "Inputs", folder: "RunFolder", console: "ConsoleTracker") -> int:
        with console.phase("loading engine and learner libraries", is_brief=True):
            from rl_sync_trainer.training_run import TrainingRun

        return await TrainingRun(settings, inputs, folder, console).run()

    return {"describe": describe_plan, "launch": launch}


if __name__ == "__main__":
    raise SystemExit(main())
