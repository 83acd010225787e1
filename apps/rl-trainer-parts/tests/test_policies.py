"""Which Hugging Face folder a path stands for, and exporting it."""

import os
from pathlib import Path

import pytest

from rl_core.errors import CheckpointError, SettingsError
from rl_distill.checkpoints.pending_save import PendingSave
from rl_distill.checkpoints.store import CheckpointStore
from rl_sync_trainer.main import main
from rl_trainer_parts.run.policies import export_policy, find_policy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 3 and 12."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=5)
    for step in (3, 12):

        def write_learner(folder: Path, step: int = step) -> PendingSave:
            (folder / "policy").mkdir()
            (folder / "policy" / "config.json").write_text("{}")
            (folder / "policy" / "model.safetensors").write_text(f"weights of step {step}")
            return PendingSave()

        store.begin(step, {"step": step}, write_learner)
    store.close()
    return tmp_path / "run"


def test_a_run_stands_for_its_newest_checkpoint(run: Path) -> None:
    newest = run / "checkpoints" / "step_12"
    assert find_policy(run) == find_policy(newest) == find_policy(newest / "policy") == newest / "policy"
    assert find_policy(run / "checkpoints" / "step_3") == run / "checkpoints" / "step_3" / "policy"


def test_paths_that_stand_for_no_policy(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match="has no checkpoint yet"):
        find_policy(tmp_path / "new")
    with pytest.raises(SettingsError, match="nowhere does not exist"):
        find_policy(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="is neither a Hugging Face folder"):
        find_policy(tmp_path)


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    os.truncate(run / "checkpoints" / "step_12" / "policy" / "model.safetensors", 3)
    with pytest.raises(CheckpointError, match="is torn"):
        export_policy(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_export_copies_the_policy(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "deep" / "exported", tmp_path / "empty"):
        assert export_policy(run, target) == run / "checkpoints" / "step_12" / "policy"
        assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
        assert (target / "model.safetensors").read_text() == "weights of step 12"


def test_export_never_overwrites(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    for target in (tmp_path / "taken", tmp_path / "taken" / "mine"):
        with pytest.raises(SettingsError, match="exists and is not empty"):
            export_policy(run, target)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]


def test_export_as_a_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run / "checkpoints" / "step_3"), str(tmp_path / "exported")]) == 0
    assert "exported" in capsys.readouterr().out
    assert (tmp_path / "exported" / "model.safetensors").read_text() == "weights of step 3"
    assert main(["export", str(run), str(tmp_path / "exported")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    os.truncate(run / "checkpoints" / "step_12" / "manifest.json", 3)
    assert main(["export", str(run), str(tmp_path / "other")]) == 1
