"""The command line while no run is live."""

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from rl_async_trainer.main import main
from rl_trainer_parts.run.folder import RunFolder


def test_help_begins_with_a_short_usage(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, status: int = 0) -> str:
        assert main(words) == status
        return capsys.readouterr().out

    usage = said("--help")
    assert usage.startswith("usage: rl-async-trainer COMMAND ...\n")
    assert len(usage.splitlines()) < 27
    assert said(status=2) == usage
    assert said("train", "--help", "schedule").startswith("[schedule]  How far generation may run ahead of training.\n")
    assert said("--version") == f"rl-async-trainer {importlib.metadata.version('rl-async-trainer')}\n"


def test_a_run_that_is_not_there_is_told_from_one_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def complaint(*words: str) -> str:
        assert main(words) == 1
        return capsys.readouterr().err

    assert complaint("status", "runs/a") == (
        f"error: no live run in runs/a: the folder does not exist (looked in {tmp_path}). "
        "A run creates it after checking its settings.\n"
    )
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    assert "it has no control.json, which exists while rl-async-trainer runs." in complaint("status", "runs/a")
    folder = RunFolder(run)
    folder.acquire()
    try:
        assert f"process {os.getpid()} holds runs/a but does not answer" in complaint("status", "runs/a")
    finally:
        folder.release()
    (run / "control.json").write_text(json.dumps({"socket": str(tmp_path / "socket")}))
    assert complaint("scale", "runs/a", "--engines", "2") == (
        "error: no live run in runs/a: its process has ended. Continue it with `train --resume`.\n"
    )
