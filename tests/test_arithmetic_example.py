"""The main job's preparation, with few steps of warm-up, makes what its settings need."""

from pathlib import Path

import pytest
from prepared import prepare_here
from tiny_run import ARITHMETIC, example_module

from rl_sync_trainer.main import main


def test_a_prepared_folder_passes_the_checks_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, prepared = example_module("prepare"), tmp_path / "prepared"
    monkeypatch.setattr(prepare, "WARM_UP_STEPS", 21)
    monkeypatch.setattr(prepare, "DEMONSTRATIONS_PER_STEP", 4)
    monkeypatch.setattr(prepare, "PREPARED", prepared)
    assert not prepare.is_prepared()
    prepare_here(prepare.prepare)
    assert prepare.is_prepared()

    files = {f"prompts.{split}": prepared / f"{split}.parquet" for split in ("train", "validation", "test")}
    changes = {"run.directory": tmp_path, "policy.path": prepared / "policy", **files}
    changes["reward.function"] = f"{ARITHMETIC}/reward.py:reward"
    words = [f"--{name}={value}" for name, value in changes.items()]
    assert main(["train", str(ARITHMETIC / "settings.toml"), "--dry-run", *words]) == 0
