"""The arithmetic example's preparation, with few warm-up steps, creates the files that its settings need."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prepared import prepare_here
from tiny_run import ARITHMETIC, example_module

from rl_sync_trainer.main import main

TORCH_COMES = """
import os, sys
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
sys.path.insert(0, sys.argv[1])
import run
"""


def test_a_prepared_folder_passes_the_checks_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, prepared = example_module("prepare"), tmp_path / "prepared"
    monkeypatch.setattr(prepare, "DEMONSTRATIONS_PER_STEP", 4)
    example = replace(prepare.ARITHMETIC, folder=prepared, steps=21)
    assert not prepare.is_prepared(example)
    prepare_here(lambda: prepare.prepare(example=example))
    assert prepare.is_prepared(example)

    files = {f"prompts.{split}": prepared / f"{split}.parquet" for split in ("train", "validation", "test")}
    changes = {"run.directory": tmp_path, "policy.path": prepared / "policy", **files}
    changes["reward.function"] = f"{ARITHMETIC}/reward.py:reward"
    words = [f"--{name}={value}" for name, value in changes.items()]
    assert main(["train", str(ARITHMETIC / "settings.toml"), "--dry-run", *words]) == 0


def test_threads_of_the_warm_up_sleep_while_they_wait() -> None:
    """OpenMP reads OMP_WAIT_POLICY when torch is imported, so run.py sets it before. Spinning threads starve others."""
    found = subprocess.run(
        [sys.executable, "-c", TORCH_COMES, str(ARITHMETIC)],
        env={name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.stdout == "PASSIVE\n", found.stderr
