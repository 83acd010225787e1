"""The distillation example: its settings pass the checks, and its preparation creates what a run needs."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from prepared import prepare_here

from rl_metrics.trackers.jsonl import read_metrics
from rl_sync_trainer.main import main
from rl_trainer_parts.checks.all_checks import check_values
from rl_trainer_parts.settings.sources import load_settings

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "distillation"
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load examples/distillation/prepare.py, in the folder to which the settings' paths are relative."""
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("task", "arithmetic"):  # other examples have modules with these names
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location("distillation_prepare", FOLDER / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "distillation_prepare", module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_settings_pass_the_checks_and_differ_only_in_what_is_learnt_from() -> None:
    ours, grpo = (load_settings(FOLDER / f"{name}.toml", []) for name in ("settings", "grpo"))
    for settings in (ours, grpo):
        check_values(settings)
    assert list(ours.distillation.teachers) == ["adder"]
    assert ours.distillation.use_task_rewards is False
    assert grpo.distillation.teachers == {}
    for section in ("policy", "prompts", "rollout", "vllm", "reward", "trainer"):
        assert getattr(ours, section) == getattr(grpo, section)


def test_slips_are_digits_of_answers_and_are_not_learnt(example: ModuleType) -> None:
    problems = example.SOURCE.task.split_problems()["validation"]
    shown = example.demonstrations(problems, lambda problem: problem.scratchpad)
    slipped = example.with_slips(shown, 0.5, np.random.default_rng(0))
    before, after = (batch.ragged("input_ids").values for batch in (shown, slipped))
    learnt, still_learnt = (batch.ragged("loss_mask").values for batch in (shown, slipped))
    assert (before != after).any()
    assert not still_learnt[before != after].any()
    assert learnt[before != after].all()
    assert not still_learnt[~learnt].any()
    assert example.with_slips(shown, 0.0, np.random.default_rng(0)) is shown


def test_a_student_is_prepared_and_distilled(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the real preparation with two steps per model, then the example on transformers, which starts fast."""
    prepared = tmp_path / "prepared"
    monkeypatch.setattr(example, "PREPARED", prepared)
    assert not example.is_prepared()
    sizes = {"teacher": example.TEACHER.sizes, "student": SIZES}
    lessons = [replace(one, steps=2, sizes=sizes[one.name]) for one in (example.TEACHER, example.STUDENT)]
    prepare_here(lambda: example.prepare(lessons))
    assert example.is_prepared()
    configs = {name: json.loads((prepared / name / "config.json").read_text()) for name in sizes}
    assert {name: config["num_hidden_layers"] for name, config in configs.items()} == {"teacher": 4, "student": 1}
    changes = {
        "run.directory": tmp_path / "runs",
        "policy.path": prepared / "student",
        **{f"prompts.{split}": prepared / f"{split}.parquet" for split in ("train", "validation", "test")},
        "prompts.validation_limit": 4,
        "distillation.teachers.adder.model": prepared / "teacher",
        "rollout.engine": "transformers",
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 2,
        "optimizer.num_threads": 1,
        "trainer.steps": 2,
        "metrics.strict": "true",
        "metrics.console": "off",
    }
    words = [f"--{name}={value}" for name, value in changes.items()]
    assert main(["train", str(FOLDER / "settings.toml"), *words]) == 0
    rows = [row.metrics for row in read_metrics(tmp_path / "runs" / "distillation" / "metrics.jsonl")]
    losses = [row["actor/distillation/loss"] for row in rows if "actor/distillation/loss" in row]
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)
    assert [row["teacher/adder/trajectories"] for row in rows[1:]] == [8, 8]
