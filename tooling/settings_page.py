"""Write docs/settings.md, every setting with its type, default and meaning: `nox -s docs -- --settings`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from rl_async_trainer.settings import AsyncSettings
from rl_sync_trainer.sft.settings import SftSettings
from rl_trainer_parts.settings.algorithm_choice import option_fields
from rl_trainer_parts.settings.fields import (
    SettingField,
    changeable_on_resume,
    describe_type,
    setting_fields,
    written,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
SFT_RESUME = changeable_on_resume(SftSettings)
HEAD = """\
# Settings

Every setting of both trainers, and of `rl-sync-trainer sft`, which has those of the sections and names that
`rl-sync-trainer sft --help` lists. `nox -s docs -- --settings` writes this page from the code; a test fails when it is
out of date. `rl-sync-trainer train --help SECTION` prints the same in a terminal.

A setting comes from the command line (`--trainer.steps=20`), an environment variable (`RL__TRAINER__STEPS=20`) or the
TOML file, in this order. A setting marked *resume* may change when a run is resumed. `NAME` stands for a name of your
choice, such as a teacher's."""


def page() -> str:
    """Return the page's text."""
    sections = (*AsyncSettings.model_fields, "sft")
    return "\n".join((HEAD, *(line for section in sections for line in section_lines(section))))


def section_lines(section: str) -> Iterator[str]:
    """Yield the heading and table of a section."""
    command = SftSettings if section == "sft" else AsyncSettings
    kind = command.model_fields[section].annotation
    meaning = (inspect.getdoc(kind) or "").partition("\n")[0]
    alone = "" if section in SftSettings.model_fields else " Only in the asynchronous trainer."
    yield from ("", f"## {section}", "", f"{escaped(meaning)}{alone}", "")
    yield from ("| setting | meaning |", "|---|---|")
    for name, setting in {**setting_fields(command), **option_fields()}.items():
        if name.startswith(f"{section}."):
            yield row(setting)
            yield from map(row, setting.entry_fields().values())


def row(setting: SettingField) -> str:
    """Return a setting's row."""
    is_required = setting.default is dataclasses.MISSING
    default = "required" if is_required else f"default `{written(setting.default) or '(empty)'}`"
    resume = " *Resume.*" if setting.name in changeable_on_resume(AsyncSettings) | SFT_RESUME else ""
    about = ", ".join(filter(None, (describe_type(setting.annotation), setting.bound(setting.limits))))
    cells = (
        f"`{setting.name}`<br>{escaped(about)}, {default}",
        f"{escaped(setting.meaning)}{resume}",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def escaped(text: str) -> str:
    """Return a docstring's text with Markdown syntax escaped outside code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if index % 2 else re.sub(r"([<*\[\]])", r"\\\1", part) for index, part in enumerate(parts))


if __name__ == "__main__":
    PAGE.write_text(page() + "\n")
