"""Commands refused because of a live run, an earlier run, or a model that does not load."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TinyRun, make_tiny_run, train_here
from train_process import drive

from rl_sync_trainer.main import main
from rl_trainer_parts.run.folder import FORMAT, RunFolder

KNOWN = "known: new, check-machine, check-model, train, validate, sft, export."


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    (tmp_path / "inputs").mkdir()
    return make_tiny_run(tmp_path / "inputs")


def test_a_folder_in_use_by_a_live_run_is_refused(run: TinyRun, tmp_path: Path) -> None:
    holder = RunFolder(run.run_folder)
    holder.acquire()
    try:
        (run.run_folder / "settings.toml").write_text("")
        (run.run_folder / "format").write_text(f"{FORMAT}\n")
        words = {"new": run.train_words(), "resumed": run.train_words("--resume")}
        words["archived"] = run.train_words(run__if_exists="archive")
        refusals = drive({name: {"words": w, "environment": {}} for name, w in words.items()}, tmp_path)
        for refusal in refusals.values():
            assert refusal["status"] == 2
            assert f"is in use by a live run (process {os.getpid()})" in refusal["errors"]
            assert refusal["heavy"] == []
        assert [path.name for path in run.run_folder.parent.iterdir()] == ["tiny"]
    finally:
        holder.release()


@pytest.mark.parametrize("command", ["train", "validate", "check-machine"])
def test_the_settings_of_an_older_run_are_refused_by_their_format(
    command: str, run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.run_folder / "checkpoints").mkdir(parents=True)
    file = run.run_folder / "settings.toml"
    file.write_text("[skip]\nenabled = true\n[engine]\nseed = 1\n")
    assert main([command, str(file), *(["--resume"] if command == "train" else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a run in format 1, and this version reads format 4. Use version 0.1" in line


def test_a_model_that_does_not_load_leaves_no_run(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run.folder / "policy" / "model.safetensors", 5000)
    for _ in range(2):  # the first attempt leaves no run behind
        assert train_here(run) == 2
        assert "model.safetensors" in capsys.readouterr().err
    assert not RunFolder(run.run_folder).has_run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["status", "x"],
            f"error: unknown command 'status'; {KNOWN} To check on a run, use `rl-metrics",
        ),
        (
            ["check-machine", "--jason"],
            "error: unknown option --jason; known: --json. Did you mean '--json'?\n",
        ),
        (
            ["trian"],
            f"error: unknown command 'trian'; {KNOWN} Did you mean 'train'?",
        ),
        (
            ["my.toml"],
            f"error: unknown command 'my.toml'; {KNOWN} Did you mean `train my.toml`?",
        ),
        (["train", "--help", "rolout"], "error: 'rolout' is neither a section nor a setting. Did you mean 'rollout'?"),
        (["train"], "error: train needs a settings file"),
        (["export", "only"], "error: export needs a checkpoint"),
        (["validate", "settings.toml", "--policy"], "error: --policy needs a value."),
    ],
)
def test_mistakes_in_commands(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(says)


def test_the_exit_status_reaches_the_shell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl_sync_trainer.main", "train", "nowhere.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: settings file nowhere.toml does not exist (looked in {tmp_path}).\n"


def test_help_begins_with_a_short_usage(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, status: int = 0) -> str:
        assert main(words) == status
        return capsys.readouterr().out

    usage = said("--help")
    assert usage.startswith("usage: rl-sync-trainer COMMAND ...\n")
    assert len(usage.splitlines()) < 22
    assert "--trainer.steps" not in usage
    assert said(status=2) == usage
    assert "--trainer.steps" in said("train", "--help")
    assert said("train", "settings.toml", "--help", "trainer").startswith("[trainer]  The training loop.\n")
    assert said("export", "--help").startswith("export CHECKPOINT FOLDER: ")
    assert said("--version") == f"rl-sync-trainer {importlib.metadata.version('rl-sync-trainer')}\n"
