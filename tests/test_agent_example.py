"""The agent example learns. test_tools_example.py compares its sessions with demonstrations, token by token."""

import subprocess
import sys
from pathlib import Path

import pytest
from train_process import TrainProcess

from rl_metrics.trackers.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "agent"


@pytest.mark.soak
def test_the_policy_learns_through_the_gateway_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the unchanged example end to end: real vLLM and Megatron, and one process per session."""
    monkeypatch.chdir(ROOT)
    subprocess.run([sys.executable, ROOT / "examples" / "tools" / "prepare.py"], check=True, timeout=1200)
    words = ["train", str(FOLDER / "settings.toml"), f"--run.directory={tmp_path}"]
    process = TrainProcess(words, output=tmp_path / "output.txt", environment={"OMP_NUM_THREADS": "2"})
    try:
        assert process.wait(deadline_s=1200.0) == 0, process.text
        assert process.leftovers() == []
    finally:
        process.end()

    rows = [row.metrics for row in read_metrics(tmp_path / "agent" / "metrics.jsonl")]
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:2]) / 2 + 0.3
    for row in rows[1:]:
        assert row["rollout/failed_sessions"] == row["rollout/audit_failures"] == 0
        assert row["rollout/audited_sessions"] == row["rollout/num_trajectories"] == 64
