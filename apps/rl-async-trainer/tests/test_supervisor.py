"""The supervisor: its messages and events when the run's process is killed repeatedly."""

import os
import signal
import sys
from pathlib import Path

import pytest

from rl_async_trainer.liveness.control_socket import ask_run
from rl_async_trainer.settings import AsyncSettings
from rl_async_trainer.supervisor import Supervisor
from rl_core.errors import NotReadyError
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
    assert Supervisor([str(settings.run_folder)], settings, module="mortal").run() == 128 + signal.SIGKILL
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


ASKING = """
import json, os, signal, sys
from pathlib import Path
from rl_async_trainer.liveness.control_socket import ask_run
from rl_core.errors import NotReadyError
folder = Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
(folder / "settings.toml").write_text("new")
(folder / "control.json").write_text(json.dumps({"socket": str(folder / "gone")}))
if "--resume" not in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ask_run(folder, {"do": "status"}, deadline_s=60.0)
except NotReadyError as error:
    (folder / "said").write_text(str(error))
"""


def test_the_status_of_a_run_that_restarts_does_not_advise_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    settings = settings_in(tmp_path / "runs")
    assert Supervisor([str(settings.run_folder)], settings, module="asking").run() == 0
    said = (settings.run_folder / "said").read_text()
    assert f"its supervisor (process {os.getpid()}) is restarting it" in said
    with pytest.raises(NotReadyError, match="Continue it with `train --resume`"):
        ask_run(settings.run_folder, {"do": "status"}, deadline_s=60.0)


def test_a_folder_that_the_run_did_not_come_to_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = run_mortal(tmp_path, monkeypatch, writes=False)
    assert list(folder.iterdir()) == []
