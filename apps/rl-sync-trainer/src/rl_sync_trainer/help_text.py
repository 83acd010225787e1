"""What `--help` prints."""

import dataclasses

from rich.console import Console
from rich.table import Table

from rl_sync_trainer.settings import Settings
from rl_sync_trainer.sources import describe_type, setting_fields

USAGE = """usage: rl-sync-trainer COMMAND ...

  train SETTINGS.toml [--resume] [--dry-run] [--section.name=value ...]
      Train. --resume goes on with the run in the folder; --dry-run prints the plan and ends.
  validate SETTINGS.toml [--policy FOLDER] [--section.name=value ...]
      Evaluate a Hugging Face folder or a checkpoint on the validation and test problems.
  export CHECKPOINT FOLDER
      Write the policy of a checkpoint (or of a run folder: its newest) as a Hugging Face folder.

Settings come from the command line, then environment variables (RL__TRAINER__STEPS=20), then the file.
Relative paths start at the current folder. Exit status: 0 finished, 1 failed, 2 a mistake in settings or files,
130 or 143 stopped by Ctrl-C or SIGTERM after a checkpoint; a second signal ends at once."""


def print_help() -> None:
    """Print the usage and every setting with type, default and meaning."""
    console = Console(highlight=False, soft_wrap=False)
    console.print(USAGE, markup=False)
    for section in Settings.model_fields:
        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        table.add_column(ratio=5, overflow="fold")
        table.add_column(ratio=6, overflow="fold")
        table.add_column(ratio=13)
        for setting in setting_fields().values():
            if setting.name.startswith(f"{section}."):
                default = "required" if setting.default is dataclasses.MISSING else f"= {_written(setting.default)}"
                kind = f"{describe_type(setting.annotation)} {default}"
                table.add_row(f"  --{setting.name}", kind, setting.meaning)
        console.print(f"\n[{section}]", markup=False)
        console.print(table, markup=False)


def _written(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
