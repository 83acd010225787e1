"""PPO with a critic and GAE: the critic's values become accurate, and the policy learns."""

from pathlib import Path

import pytest
from prepared import prepare_here
from tiny_run import ARITHMETIC, TinyRun, copy_tiny_run, example_module, make_tiny_run, train_here
from train_process import TrainProcess

from rl_metrics.trackers.jsonl import read_metrics


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("ppo"))


def test_a_critic_with_a_head_start_trains_alone_first(tiny_run: TinyRun):
    settings = {"algorithm__advantage": "gae", "critic__head_start_steps": 1, "trainer__minibatches": 2}

    assert train_here(tiny_run, trainer__steps=2, **settings) == 0

    first, second = (row.metrics for row in read_metrics(tiny_run.run_folder / "metrics.jsonl")[1:])
    assert first["critic/grad_norm"] > 0
    assert "actor/grad_norm" not in first
    assert second["actor/grad_norm"] > 0
    assert first["critic/values/mean"] == 0
    assert second["critic/values/mean"] != 0
    assert (tiny_run.run_folder / "checkpoints" / "step_2" / "critic" / "learner.json").is_file()


def test_ppo_learns_on_one_rank(tiny_run: TinyRun, tmp_path: Path):
    run = copy_tiny_run(tiny_run, tmp_path / "run")
    settings = {"algorithm__advantage": "gae", "critic__learning_rate": 3e-3, "critic__head_start_steps": 2}
    sizes = {"rollout__prompts_per_step": 8, "rollout__group_size": 8, "trainer__steps": 16}

    assert train_here(run, **settings, **sizes, trainer__validate_every=0, trainer__checkpoint_every=0) == 0

    assert_learnt(run.run_folder)


@pytest.mark.soak
def test_ppo_learns_arithmetic(tmp_path: Path):
    """Train the arithmetic example's policy, with real vLLM."""
    prepare = example_module("prepare")
    if not prepare.is_prepared():
        prepare_here(prepare.prepare)
    words = ["train", str(ARITHMETIC / "settings.toml"), f"--run.directory={tmp_path}", "--run.name=ppo"]
    words += ["--algorithm.advantage=gae", "--critic.learning_rate=3e-4", "--critic.head_start_steps=2"]
    words += ["--trainer.steps=16", "--trainer.validate_every=0", "--trainer.checkpoint_every=0"]
    words += ["--policy.path=" + str(ARITHMETIC / "prepared" / "policy")]
    words += [f"--prompts.{split}={ARITHMETIC}/prepared/{split}.parquet" for split in ("train", "validation", "test")]
    words += [f"--reward.function={ARITHMETIC}/reward.py:reward"]

    process = TrainProcess(words, output=tmp_path / "output.txt", environment={"OMP_NUM_THREADS": "2"})
    try:
        assert process.wait(deadline_s=900.0) == 0, process.text
    finally:
        process.end()

    assert_learnt(tmp_path / "ppo")


def assert_learnt(folder: Path) -> None:
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    losses = [row["critic/vf_loss"] for row in rows if "critic/vf_loss" in row]
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    assert losses[-1] < 0.6 * losses[0]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    accuracy = [row["val-core/arithmetic/reward/mean@1"] for row in rows if "val-core/arithmetic/reward/mean@1" in row]
    assert accuracy[-1] > accuracy[0] + 0.2
