"""The tools example: a session of its loop equals a warm-up demonstration; the policy learns to use the calculator."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from chat_model import Speaker, run_loop
from prepared import prepare_here, prepared_folder
from train_process import TrainProcess

from rl_core.data.records import Prompt
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout import PromptTokenizer, SamplingParams, resolve_loop, resolve_reward

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "tools"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/tools/prepare.py, which imports its neighbour task.py; run in the repository's root."""
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    spec = importlib.util.spec_from_file_location("tools_prepare", FOLDER / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.modules["task"]  # monkeypatch would restore it, but the arithmetic example has a task.py too
    return module


def test_problems_are_split_without_overlap(example: ModuleType) -> None:
    splits = example.task.split_problems()
    assert {name: len(members) for name, members in splits.items()} == {"train": 7588, "validation": 256, "test": 256}
    assert len({problem for members in splits.values() for problem in members}) == 8100
    problem = example.task.Problem(37, 58)
    assert (problem.question, problem.answer, problem.hasty_answer) == ("37*58", "2146", "1500")


@pytest.mark.parametrize("name", ["tools", "agent"])  # agent trains the model of tools through the gateway
@pytest.mark.parametrize("asks", [True, False])
def test_a_session_of_the_loop_is_a_demonstration(example: ModuleType, name: str, asks: bool) -> None:
    folder = FOLDER.with_name(name)
    settings = tomllib.loads((folder / "settings.toml").read_text())
    problem = example.task.Problem(37, 58)
    tokenizer = PromptTokenizer(example.make_tokenizer())
    said = [f"{problem.call}<eos>", f"{problem.answer}<eos>"] if asks else [f"{problem.hasty_answer}<eos>"]
    speaker = Speaker(tokenizer, lambda heard: said[heard.count("[")], end="<eos>")
    messages = ({"role": "user", "content": problem.question},)
    ids = tokenizer.encode([tokenizer.render(messages)], add_special_tokens=False)[0]
    prompt = Prompt(uid="p", input_ids=np.asarray(ids, dtype=np.int32), messages=messages, ground_truth=problem.answer)
    (group,) = run_loop(
        resolve_loop(settings["rollout"]["loop"], settings["rollout"]["loop_options"]),
        speaker,
        [prompt],
        sampling=SamplingParams(max_tokens=settings["rollout"]["max_response_tokens"]),
        reward=resolve_reward(f"{folder / 'reward.py'}:reward"),
    )
    assert group.failures == ()
    (trajectory,) = group.trajectories
    demonstration = example.demonstration(example.make_tokenizer(), problem, asks=asks)
    assert trajectory.input_ids.tolist() == demonstration.input_ids.tolist()
    assert trajectory.loss_mask.tolist() == demonstration.loss_mask.tolist()
    assert trajectory.reward == float(asks)
    assert len(ids) <= settings["prompts"]["max_tokens"]


@pytest.mark.slow
def test_the_policy_learns_to_ask_the_calculator(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train end to end after a shorter warm-up, with real vLLM and Megatron and a calculator behind an MCP server."""
    monkeypatch.setattr(example, "WARM_UP_STEPS", 150)
    monkeypatch.setattr(example, "PREPARED", prepared_folder("tools-150"))
    if not example.is_prepared():
        prepare_here(example.prepare)
    prepared = ("policy", *(f"{split}.parquet" for split in ("train", "validation", "test")))
    places = zip(("policy.path", "prompts.train", "prompts.validation", "prompts.test"), prepared, strict=True)
    words = ["train", str(FOLDER / "settings.toml"), f"--run.directory={tmp_path}", "--trainer.steps=6"]
    words += ["--rollout.prompts_per_step=16", "--optimizer.warmup_steps=0", "--trainer.validate_every=0"]
    words += [f"--{setting}={example.PREPARED / name}" for setting, name in places]
    process = TrainProcess(words, output=tmp_path / "output.txt", environment={"OMP_NUM_THREADS": "2"})
    try:
        assert process.wait(deadline_s=600.0) == 0, process.text
        assert process.leftovers() == []
    finally:
        process.end()

    rows = [row.metrics for row in read_metrics(tmp_path / "tools" / "metrics.jsonl")]
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1
    for row in rows[1:]:
        assert row["agent_loop/tool_calls/max"] > 0
        assert row["tools/calls/ok"] > 0
        assert row["rollout/failed_sessions"] == row["rollout/audit_failures"] == 0
        assert row["rollout/audited_sessions"] == row["rollout/num_trajectories"] == 128
