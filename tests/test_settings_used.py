"""Every setting is used, or refused or noted by name, by each trainer: another value changes what a run does.

Each trainer's real command runs on recording fakes (`recorded_fakes`). A new setting needs a row in
`setting_alternatives`.
"""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun, record_command
from setting_alternatives import ALTERNATIVES, OF_SFT, SKIP, Other
from setting_runs import make_inputs, words_of

from rl_async_trainer.settings import AsyncSettings
from rl_sync_trainer.sft.settings import SftSettings
from rl_trainer_parts.run.folder import FORMAT
from rl_trainer_parts.settings.fields import setting_fields
from rl_trainer_parts.settings.schema import Settings

KINDS: dict[str, type[Settings]] = {"sync": Settings, "async": AsyncSettings, "sft": SftSettings}
RAN = ("status 0", "status 3", "status 137")
"""A run finished, paused, or was killed under a supervisor."""


def names_of(kind: type[Settings]) -> list[str]:
    """Return every setting, with those of a table's entries."""
    return [name for field in setting_fields(kind).values() for name in (field.name, *field.entry_fields())]


class Walk:
    """Runs of one trainer; a run that several settings are compared with is made once."""

    def __init__(self, trainer: str, folder: Path) -> None:
        self.trainer = trainer
        self._folder = folder
        self._known: dict[str, RecordedRun] = {}

    def run(self, row: Other, changes: dict[str, Any]) -> RecordedRun:
        chosen = {**row.beside, **changes}
        key = json.dumps([chosen, row.found, row.is_supervised], sort_keys=True)
        if key not in self._known:
            self._known[key] = record_command(
                self.trainer,
                words_of(self.trainer, self._folder, chosen),
                run_folder=self._folder / "runs" / "run",
                is_supervised=row.is_supervised,
                prepare=lambda: self._prepare(row),
            )
        return self._known[key]

    def _prepare(self, row: Other) -> None:
        """Write what the run finds."""
        runs = self._folder / "runs"
        if row.found == "run":
            (runs / "run").mkdir(parents=True)
            (runs / "run" / "settings.toml").write_text("")
            (runs / "run" / "format").write_text(f"{FORMAT}\n")
        elif row.found in ("cache", "broken"):
            record_command(
                self.trainer, words_of(self.trainer, self._folder, SKIP), run_folder=runs / "run", keeps=True
            )
            shutil.rmtree(runs / "run")
        if row.found == "broken":
            (entry,) = runs.glob("cache/train-*.zarr.zip")
            entry.write_text("{}")

    def problem(self, name: str) -> str | None:
        """Return why a setting counts as ignored; None if it does not."""
        rows = {**ALTERNATIVES, **OF_SFT} if self.trainer == "sft" else ALTERNATIVES
        row, leaf = rows[name], name.replace("NAME", "t")
        before, after = self.run(row, {}), self.run(row, {leaf: row.value})
        is_named = [leaf in run.output or bool(row.says and row.says in run.output) for run in (before, after)]
        for run, named in zip((before, after), is_named, strict=True):
            if not has_run(run) and not named:
                return f"{leaf}: the run failed without naming it: {run.output[-500:]}"
        is_refused = not has_run(after) and is_named[1]
        is_same = Counter(before.entries) == Counter(after.entries)
        return f"{leaf} = {row.value!r} changes nothing" if is_same and not is_refused else None


def has_run(run: RecordedRun) -> bool:
    return any(entry.strip() in RAN for entry in run.entries)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings") / "inputs"
    make_inputs(folder)
    return folder


def test_every_setting_has_another_value_to_try():
    names = {name for kind in KINDS.values() for name in names_of(kind)}
    assert sorted(names ^ ALTERNATIVES.keys()) == []


@pytest.mark.parametrize("trainer", KINDS)
def test_every_setting_is_used_or_named(trainer: str, folder: Path):
    walk = Walk(trainer, folder)
    walk.run(Other(value=None), {"run.seed": 5})  # what the first run in a process prints, such as warnings, differs
    names = names_of(KINDS[trainer])
    if trainer == "sft":  # no rule of health reads what a fake learner does in supervised training
        names = [name for name in names if not name.startswith("health.")]
    found = [problem for name in names if (problem := walk.problem(name))]
    assert not found, "\n".join(found)
