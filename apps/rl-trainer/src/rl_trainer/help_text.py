"""What `--help` prints."""

import dataclasses
import shutil
import textwrap

from rl_trainer.setting_fields import SettingField, describe_type, setting_fields
from rl_trainer.settings import Settings

ORIGINS = """Settings come from the command line, then environment variables (RL__TRAINER__STEPS=20), then the file.
Relative paths start at the current folder. Exit status: 0 finished, 1 failed, 2 a mistake in settings or files,
3 paused by health.pause_on after a checkpoint, 130 or 143 stopped by Ctrl-C or SIGTERM after one; a second signal ends
at once."""

INDENT = " " * 8


def help_text(usage: str, kind: type[Settings] = Settings) -> str:
    """The usage, and every setting with its type, default and meaning."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [usage, "", ORIGINS]
    for section in kind.model_fields:
        lines.append(f"\n[{section}]")
        for setting in setting_fields(kind).values():
            if setting.name.startswith(f"{section}."):
                for one in (setting, *setting.entry_fields().values()):
                    lines.extend(_explained(one, width))
    return "\n".join(lines)


def _explained(setting: SettingField, width: int) -> list[str]:
    is_required = setting.default is dataclasses.MISSING
    default = "required" if is_required else f"default {_written(setting.default)}"
    words = textwrap.wrap(setting.meaning, width - 8, initial_indent=INDENT, subsequent_indent=INDENT)
    return [f"  --{setting.name}={describe_type(setting.annotation)}  ({default})", *words]


def _written(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        return "{}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
