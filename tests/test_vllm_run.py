"""A run with real vLLM, stopped by Ctrl-C and resumed, continues to learn."""

import json
import signal
from pathlib import Path

import pytest
from tiny_run import REWARDS_BEFORE_STEP_1, make_tiny_run
from train_process import training, wait_until_held

from rl_metrics.trackers.jsonl import read_metrics
from rl_sync_trainer.main import main

pytest.importorskip("vllm")

GROUP_SIZE = 8
STEPS = 14
STOP_IN_STEP = 6
HOLD_AFTER = REWARDS_BEFORE_STEP_1 + (STOP_IN_STEP - 1) * 4 * GROUP_SIZE + 5


def test_stopped_by_ctrl_c_resumed_and_learning(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    settings = {
        "rollout__engine": "vllm",
        "rollout__group_size": GROUP_SIZE,
        "trainer__steps": STEPS,
        "trainer__validate_every": 0,
        "trainer__checkpoint_every": 0,
    }
    with training(run, hold_after=HOLD_AFTER, reward__timeout_s=None, **settings) as process:
        wait_until_held(process, run)
        process.signal_group(signal.SIGINT)
        assert process.wait() == 130, process.text
        assert process.leftovers() == []
        assert f"stopped after step {STOP_IN_STEP - 1}; continue with --resume" in process.text
        assert "Traceback" not in process.text
    with training(run, "--resume", **settings) as process:
        assert process.wait() == 0, process.text
        assert process.leftovers() == []
        assert "resuming from" in process.text
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(STEPS + 1))
    assert [row.metrics["training/policy_version"] for row in rows[1:]] == list(range(1, STEPS + 1))
    assert all(row.metrics["weights/canary_max_diff"] < 1e-4 for row in rows[1:])
    rewards = [row.metrics["critic/rewards/mean"] for row in rows[1:]]
    assert sum(rewards[:3]) / 3 < 0.45
    assert sum(rewards[-3:]) / 3 > 0.7
    before, after = rewards[STOP_IN_STEP - 2], rewards[STOP_IN_STEP - 1]
    assert after > before - 0.2, "the resumed run must not begin anew"
    summary = json.loads((run.run_folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["num_samples"] == STEPS * 4 * GROUP_SIZE


def test_a_head_size_that_vllm_does_not_support_is_refused_before_anything_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_tiny_run(tmp_path)
    file = run.folder / "policy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 16}))
    capsys.readouterr()
    assert main(run.train_words("--dry-run", rollout__engine="vllm")) == 2
    said = capsys.readouterr().err
    assert said.startswith('error: rollout.engine = "vllm": ')
    assert "head_dim must be one of 32, 64, 80," in said
    assert "; config.json has 16. " in said
    assert not run.run_folder.exists()
