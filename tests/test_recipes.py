"""The recipes use existing commands, settings, options and files."""

import io
import re
import shlex
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from rl_async_trainer import main as async_command
from rl_async_trainer.settings import AsyncSettings
from rl_metrics.cli import main as metrics_command
from rl_sync_trainer import main as sync_command
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import load_settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
TRAINERS = {"rl-sync-trainer": (Settings, sync_command), "rl-async-trainer": (AsyncSettings, async_command)}
FLAGS = ("--resume", "--dry-run")
NEEDED = ("--policy.path=policy", "--prompts.train=train.jsonl")
"""Settings that a user's own file contains."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_settings_that_load(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, verb, *words = shlex.split(command, comments=True)
    if program in TRAINERS and verb == "train" and "--help" not in words:
        file, *settings = [word for word in words if word not in FLAGS]
        is_ours = file.startswith("examples/")
        load_settings(
            Path(file) if is_ours else None,
            [*settings, *(() if is_ours else NEEDED)],
            {},
            kind=TRAINERS[program][0],
        )
        return
    assert command_exists(program, verb, words)


def command_exists(program: str, verb: str, words: list[str]) -> bool:
    """Return True if the command's help names the verb and each option; `train --help` must succeed."""
    options = [word for word in words if word.startswith("--") and word != "--help"]
    if program in TRAINERS and verb == "train":
        return TRAINERS[program][1].main([verb, *words]) == 0
    said = io.StringIO()
    run = TRAINERS[program][1].main if program in TRAINERS else metrics_command
    with redirect_stdout(said), suppress(SystemExit):
        run([verb, "--help"])
    return f"{verb} " in said.getvalue() and all(option in said.getvalue() for option in options)


def test_each_recipe_is_short() -> None:
    recipes = PAGE.split("\n## ")[1:]
    assert len(recipes) >= 10
    assert [recipe.partition("\n")[0] for recipe in recipes if len(recipe.strip().splitlines()) > 19] == []
