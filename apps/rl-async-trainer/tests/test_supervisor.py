"""The supervisor: its messages and events when the run's process is killed repeatedly."""

import signal
from pathlib import Path

import pytest

from rl_async_trainer.settings import AsyncSettings
from rl_async_trainer.supervisor import supervise
from rl_metrics.run_files.events import read_events
from rl_trainer_parts.settings.sources import build_settings

MORTAL = """
import os, signal, sys
from pathlib import Path
folder = Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
if {writes}:
    (folder / "settings.toml").write_text(" ".join(sys.argv))
os.kill(os.getpid(), signal.SIGKILL)
"""


def settings_in(folder: Path) -> AsyncSettings:
    values = {
        "run": {"directory": folder},
        "policy": {"path": "policy"},
        "prompts": {"train": "train.jsonl"},
        "reward": {"function": "exact_match"},
        "roles": {"controller_restarts": 1},
    }
    return build_settings(values, kind=AsyncSettings)


def run_mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, writes: bool) -> Path:
    """Supervise a run whose process kills itself at once; return its folder."""
    (tmp_path / "mortal.py").write_text(MORTAL.format(writes=writes))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = settings_in(tmp_path / "runs")
    assert supervise([str(settings.run_folder)], settings, module="mortal") == 128 + signal.SIGKILL
    return settings.run_folder


def test_a_run_that_is_killed_too_often_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = run_mortal(tmp_path, monkeypatch, writes=True)
    (event,) = read_events(folder / "events.jsonl")
    assert (event["event"], event["role"]) == ("run_failed", "controller")
    assert event["error"] == (
        "RoleDiedError: signal 9 (SIGKILL) ended the run's process. It was restarted 1 time, the maximum "
        "(roles.controller_restarts)."
    )
    assert not (folder / "summary.json").exists()
    assert (folder / "settings.toml").read_text().endswith("--resume"), "it was started again"


def test_a_folder_that_the_run_did_not_come_to_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = run_mortal(tmp_path, monkeypatch, writes=False)
    assert list(folder.iterdir()) == []
