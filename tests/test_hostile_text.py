"""Text that cannot be encoded does not end a run: it is escaped, or its session fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from async_runs import train_async_here
from tiny_run import NUM_PROBLEMS, REWARDS_PER_STEP, TinyRun, example_module, make_tiny_run, train_here

from rl_metrics.run_files.rollout_log import read_rollouts
from rl_metrics.trackers.jsonl import read_metrics

HOSTILE = "half \ud800 \x00\x1b[31m\u202e\ufffe"

REWARD = r"""
from rl_rollout.rewards import RewardResult, quick

HALF = "half \ud800 \x00\x1b[31m\u202e\ufffe"
count = 0


@quick
def reward(sample):
    global count
    if not sample.response_text or not sample.columns["trains"]:
        return 0.0
    count += 1
    if count % 8 == 3:
        raise ValueError(HALF)
    if count % 8 == 5:
        deep = []
        for _ in range(400):
            deep = [deep]
        return RewardResult(reward=1.0, extras={"deep": deep})
    score = sum(character in "02468" for character in sample.response_text) / 8
    return RewardResult(reward=score, components={HALF: score}, extras={HALF: [HALF, {HALF: HALF}]})
"""


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    """A run whose problems and reward contain text that cannot be encoded."""
    run = make_tiny_run(tmp_path)
    (run.folder / "reward.py").write_text(REWARD)
    problems = example_module("task").split_problems()
    for split, count in NUM_PROBLEMS.items():
        rows = [
            {
                "prompt": problem.question,
                "data_source": HOSTILE,
                "answer": {HOSTILE: [HOSTILE]},
                HOSTILE: HOSTILE,
                "trains": split == "train",
            }
            for problem in problems[split][:count]
        ]
        (run.folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


@pytest.mark.parametrize("train", [train_here, train_async_here], ids=["sync", "async"])
def test_hostile_text_of_problems_and_rewards_ends_no_run(
    run: TinyRun, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"prompts__{split}": run.folder / f"{split}.jsonl" for split in NUM_PROBLEMS}
    settings = {"trainer__steps": 2, "metrics__report": True}
    assert train(run, metrics__trackers='["tensorboard"]', **files, **settings) == 0
    rows = read_metrics(run.run_folder / "metrics.jsonl")
    assert [row.step for row in rows] == [0, 1, 2]
    assert 0 < sum(row.metrics["rollout/failed_sessions"] for row in rows[1:]) < 2 * REWARDS_PER_STEP
    kept = HOSTILE.replace("\ud800", "\\ud800")
    assert {row.source for row in read_rollouts(run.run_folder / "rollouts.jsonl")} == {kept}
    assert f"val-core/{kept}/reward/mean@1" in rows[0].metrics
    assert "tracker_failed" not in capsys.readouterr().err
