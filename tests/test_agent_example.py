"""The agent example: a program that talks to the gateway alone gives the tokens of a demonstration, and it learns."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from chat_model import Speaker, run_loop
from train_process import TrainProcess

from rl_core.data.records import Prompt
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout import PromptTokenizer, SamplingParams, resolve_loop, resolve_reward

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "agent"
SETTINGS = tomllib.loads((FOLDER / "settings.toml").read_text())


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/tools/prepare.py, which makes the model; run where the settings' paths begin."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "tools"))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    spec = importlib.util.spec_from_file_location("tools_prepare", ROOT / "examples" / "tools" / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.modules["task"]  # not by monkeypatch, which would put it back: other examples have one too
    return module


@pytest.mark.parametrize("asks", [True, False])
def test_what_the_program_asks_of_the_gateway_is_a_demonstration(tools: ModuleType, asks: bool) -> None:
    problem = tools.task.Problem(37, 58)
    tokenizer = PromptTokenizer(tools.make_tokenizer())
    said = [f"{problem.call}<eos>", f"{problem.answer}<eos>"] if asks else [f"{problem.hasty_answer}<eos>"]
    speaker = Speaker(tokenizer, lambda heard: said[heard.count("[")], end="<eos>")
    messages = ({"role": "user", "content": problem.question},)
    ids = tokenizer.encode([tokenizer.render(messages)], add_special_tokens=False)[0]
    prompt = Prompt(uid="p", input_ids=np.asarray(ids, dtype=np.int32), messages=messages, ground_truth=problem.answer)
    (group,) = run_loop(
        resolve_loop(SETTINGS["rollout"]["loop"], SETTINGS["rollout"]["loop_options"]),
        speaker,
        [prompt],
        sampling=SamplingParams(max_tokens=SETTINGS["rollout"]["max_response_tokens"]),
        reward=resolve_reward(f"{FOLDER / 'reward.py'}:reward"),
    )
    assert group.failures == ()
    (trajectory,) = group.trajectories
    demonstration = tools.demonstration(tools.make_tokenizer(), problem, asks=asks)
    assert trajectory.input_ids.tolist() == demonstration.input_ids.tolist()
    assert trajectory.loss_mask.tolist() == demonstration.loss_mask.tolist()
    assert trajectory.reward == float(asks)


@pytest.mark.soak
def test_the_policy_learns_through_the_gateway_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end: real vLLM and Megatron, and a process for each session; the example as it is."""
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
