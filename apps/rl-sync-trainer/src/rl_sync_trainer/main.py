"""The command line: new, check-machine, check-model, sft, train, validate, export."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_trainer_parts.commands.command_line import HELP, USAGE, explain, run_program, train_command

if TYPE_CHECKING:
    from rl_metrics.trackers import ConsoleTracker
    from rl_trainer_parts.rollouts.inputs import Inputs
    from rl_trainer_parts.run.folder import RunFolder
    from rl_trainer_parts.settings.schema import Settings

NAME = "rl-sync-trainer"
TRAIN = """\
  sft SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]
      Train on demonstrations, such as before `train`. `sft --help` explains its settings.
  train SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]
      Train. --resume continues the run in the folder; --dry-run checks everything, prints the plan and exits.
      policy.path may be a run, whose newest checkpoint is used; --best uses its best one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    usage, commands = USAGE.format(program=NAME, train=TRAIN, others=""), {"train": train, "sft": sft}
    return run_program(arguments, name=NAME, usage=usage, commands=commands, settings=_settings_class)


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


def sft(words: list[str]) -> int:
    """`sft SETTINGS.toml [--resume] [--dry-run] [--best] [--section.name=value ...]`."""
    from rl_sync_trainer.sft.settings import SftSettings

    if asked := [index for index, word in enumerate(words) if word in HELP]:
        return explain(words[asked[0] + 1 :], usage=TRAIN, settings=lambda: SftSettings)
    return train_command(words, program=NAME, kind=SftSettings, trainer=_sft_trainer)


def _sft_trainer(_: Any) -> dict[str, Any]:
    from rl_sync_trainer.sft.demonstrations import check_sft
    from rl_sync_trainer.sft.training_run import SftRun
    from rl_trainer_parts.commands.plan import describe_learner

    describe = lambda settings, _inputs, lines: describe_learner(settings, lines)
    return {"check": check_sft, "describe": describe, "launch": lambda *parts: SftRun(*parts).run()}


if __name__ == "__main__":
    raise SystemExit(main())
