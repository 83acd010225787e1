"""Self-distillation end to end, in both trainers, and its example."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from async_runs import differences_from_sync, train_async_here
from prepared import prepare_here
from run_equality import differing_metrics, learnt
from tiny_run import TinyRun, copy_tiny_run, make_tiny_run, train_here

from rl_metrics.trackers.jsonl import read_metrics
from rl_sync_trainer.main import main
from rl_trainer_parts.learning import step as learning

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "self-distillation"
REWARD = '''"""The even digits' share, with the first digit as feedback where it is odd."""

from rl_rollout.rewards import RewardResult


def reward(sample):
    text = sample.response_text
    odd = [character for character in text[:1] if character in "13579"]
    share = sum(character in "02468" for character in text) / max(len(text), 1)
    return RewardResult(reward=share, extras={"feedback": "".join(odd)})
'''
SETTINGS = {
    "distillation__self_teacher__prompts": '["{prompt}:{best_response}", "{prompt};{feedback}"]',
    "distillation__self_teacher__min_reward": 0.6,
    "distillation__loss": "reverse_kl",
    "distillation__top_k": 4,
    "rollout__max_response_tokens": 6,
    "trainer__validate_first": False,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_tiny_run(tmp_path_factory.mktemp("self-distillation"))
    (run.folder / "reward.py").write_text(REWARD)
    return run


def test_both_trainers_teach_the_policy_by_its_average_and_resume_bit_for_bit(inputs: TinyRun, tmp_path: Path) -> None:
    sync, resumed, other = (copy_tiny_run(inputs, tmp_path / name) for name in ("sync", "resumed", "async"))
    settings = {**SETTINGS, "distillation__self_teacher__model": "average"}
    assert train_here(sync, **settings) == 0
    assert train_here(resumed, **settings, trainer__steps=2) == 0
    assert train_here(resumed, "--resume", **settings) == 0
    assert train_async_here(other, **settings, schedule__max_staleness=0) == 0
    assert [one for one in differing_metrics(resumed, sync) if ": test" not in one] == []  # it also tested in between
    assert learnt(resumed) == learnt(sync)
    assert differences_from_sync(other, sync) == []
    rows = [row.metrics for row in read_metrics(sync.run_folder / "metrics.jsonl") if row.step]
    assert all(0.0 < row["actor/distillation/aligned_fraction"] < 1.0 for row in rows), "some have no teacher's prompt"
    assert all(row["actor/distillation/loss"] > 0.01 for row in rows)
    assert all(row["timing_s/teacher"] > 0 for row in rows)
    assert "critic/advantages/mean" not in rows[0]


def test_an_adapter_learns_from_its_base_under_the_prompts_that_the_queue_carries(
    inputs: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained batch has, for each trained token, transformers' logprob under the teacher's prompt as a reward."""
    run, batches = copy_tiny_run(inputs, tmp_path / "run"), []
    prepare = learning.prepare_batch
    monkeypatch.setattr(
        learning,
        "prepare_batch",
        lambda parts, batch, *rest, **named: batches.append(batch) or prepare(parts, batch, *rest, **named),
    )
    settings = {
        **SETTINGS,
        "distillation__self_teacher__model": "reference",
        "distillation__self_teacher__prompts": '["{prompt}={prompt}"]',
        "distillation__loss": "k1",
        "distillation__used_as": "reward",
        "distillation__use_task_rewards": True,
        "lora__rank": 2,
        "optimizer__learning_rate": 0.05,
        "trainer__steps": 2,
        "metrics__log_rollouts": 0,
    }
    assert train_here(run, **settings) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "policy", trust_remote_code=False)
    assert len(batches) == 2
    for ids, mask, scores in zip(
        *(batches[1].ragged(n) for n in ("input_ids", "loss_mask", "teacher_logprobs")), strict=True
    ):
        prompt = ids[: mask.argmax()]
        equals = prompt[-1:]  # the template ends a prompt with "="
        read = np.concatenate([prompt, prompt[:-1], equals, ids[mask.argmax() :]]).astype(np.int64)
        with torch.no_grad():
            logprobs = model(torch.from_numpy(read)[None]).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.from_numpy(read)[1:, None])[:, 0][-mask.sum() :]
        np.testing.assert_allclose(scores[mask, 0], expected, atol=1e-4)
    rows = [row.metrics for row in read_metrics(run.run_folder / "metrics.jsonl") if row.step]
    assert rows
    assert all(row["actor/distillation/aligned_fraction"] == 1.0 for row in rows)
    assert rows
    assert all(row["critic/advantages/max"] > 0 for row in rows)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the example's prepare.py, in the folder to which the settings' paths are relative."""
    monkeypatch.chdir(FOLDER.parents[1])
    spec = importlib.util.spec_from_file_location("self_distillation_prepare", FOLDER / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        spec.loader.exec_module(module)
    return module


@pytest.mark.soak
def test_the_example_learns_without_demonstrations(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole example, whose accuracy on the test problems rises by at least 0.2; it takes two minutes."""
    prepared = tmp_path / "prepared"
    monkeypatch.setattr(example, "PREPARED", prepared)
    prepare_here(example.prepare)
    files = {f"prompts.{split}": prepared / f"{split}.jsonl" for split in ("train", "validation", "test")}
    changes = {"run.directory": tmp_path, "policy.path": prepared / "policy", "metrics.console": "off", **files}
    words = [f"--{name}={value}" for name, value in changes.items()]
    assert main(["train", str(FOLDER / "settings.toml"), *words]) == 0
    results = json.loads((tmp_path / "self-distillation" / "summary.json").read_text())
    assert results["test_accuracy_last"] > results["test_accuracy_first"] + 0.2


def test_the_example_is_prepared_and_trains(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = tmp_path / "prepared"
    monkeypatch.setattr(example, "PREPARED", prepared)
    assert not example.is_prepared()
    prepare_here(lambda: example.prepare(steps=2))
    assert example.is_prepared()
    row = json.loads((prepared / "test.jsonl").read_text().splitlines()[0])
    assert row["demonstration"].endswith(",")
    assert row["prompt"][0]["content"] not in row["demonstration"]
    changes = {
        "run.directory": tmp_path / "runs",
        "policy.path": prepared / "policy",
        **{f"prompts.{split}": prepared / f"{split}.jsonl" for split in ("train", "validation", "test")},
        "prompts.validation_limit": 4,
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 2,
        "optimizer.num_threads": 1,
        "trainer.steps": 2,
        "metrics.strict": "true",
        "metrics.console": "off",
    }
    words = [f"--{name}={value}" for name, value in changes.items()]
    assert main(["train", str(FOLDER / "settings.toml"), *words]) == 0
    rows = [one.metrics for one in read_metrics(tmp_path / "runs" / "self-distillation" / "metrics.jsonl") if one.step]
    assert len(rows) == 2
    assert all(one["actor/distillation/loss"] > 0 for one in rows)
    assert all(one["actor/distillation/aligned_fraction"] == 1.0 for one in rows)
