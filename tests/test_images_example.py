"""The images example: its problems, a small run of both trainers from its untrained model; a soak test learns."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from prepared import prepare_here

from rl_async_trainer.main import main as train_async
from rl_metrics.trackers.jsonl import read_metrics
from rl_rollout.loops.turns import Reply, TurnFormat, join_turns
from rl_rollout.prompts import PromptTokenizer
from rl_sync_trainer.main import main as train_sync

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "images"
SMALL = {
    "rollout.engine": "transformers",
    "rollout.audit_share": 1,
    "optimizer.num_threads": 1,
    "optimizer.products": "torch",
    "optimizer.warmup_steps": 0,
    "metrics.console": "off",
    "metrics.report": "false",
    "metrics.strict": "true",
    "rollout.group_size": 4,
    "rollout.prompts_per_step": 2,
    "trainer.checkpoint_every": 0,
    "trainer.steps": 2,
    "trainer.validate_every": 0,
}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """examples/images/prepare.py, run in the repository's root; it writes elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER.parents[1])
        patch.syspath_prepend(str(FOLDER))
        patch.delitem(sys.modules, "task", raising=False)  # other examples have a task.py too
        spec = importlib.util.spec_from_file_location("images_prepare", FOLDER / "prepare.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        del sys.modules["task"]
        patch.setattr(module, "PREPARED", tmp_path_factory.mktemp("images") / "prepared")
        yield module


def words(example: ModuleType, folder: Path, settings: str, changes: dict[str, object]) -> list[str]:
    """Return the arguments of `train` for a settings file of the example."""
    files = {f"prompts.{split}": example.PREPARED / f"{split}.parquet" for split in ("train", "validation", "test")}
    changes = {"run.directory": folder, "policy.path": example.PREPARED / "policy", **files, **changes}
    return ["train", str(FOLDER / settings), *(f"--{name}={value}" for name, value in changes.items())]


def test_a_picture_shows_the_squares_of_its_problem(example: ModuleType) -> None:
    problem = example.task.Problem(cells=("red", "none", "blue", "red"), colour="red", seed=0)
    assert (problem.question, problem.answer, problem.hasty_answer) == ("How many red squares?", "2", "3")
    assert problem.described_answer == " red none blue red:2"
    near = np.abs(problem.picture().astype(int) - example.task.COLOURS["red"]).max(axis=2) < 60
    assert (near.reshape(2, 16, 2, 16).sum(axis=(1, 3)) > 90).tolist() == [[True, False], [False, True]]


def test_sessions_of_several_turns_are_joined(example: ModuleType) -> None:
    tokenizer = PromptTokenizer(example.make_tokenizer())
    turns, _ = join_turns(tokenizer, TurnFormat(), role="user")
    reply = turns.reply_ids([Reply(text="How many red squares?")], last_token=tokenizer.token_id(example.END_TOKEN))
    assert tokenizer.decode([reply]) == ["How many red squares?"]


@pytest.fixture(scope="module")
def prepared(example: ModuleType) -> ModuleType:
    """The example with few problems, after a step of its warm-up."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in (("NUM_TRAIN", 8), ("NUM_VALIDATION", 2), ("NUM_TEST", 2)):
            patch.setattr(example.task, name, count)
        prepare_here(lambda: example.prepare(steps=2))
    return example


@pytest.mark.parametrize("settings", ["settings.toml", "async.toml"])
def test_a_small_run_of_each_trainer_sees_pictures(prepared: ModuleType, tmp_path: Path, settings: str) -> None:
    is_async = settings == "async.toml"
    changes = SMALL | ({"roles.placement": "inline"} if is_async else {})
    assert (train_async if is_async else train_sync)(words(prepared, tmp_path, settings, changes)) == 0
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    rows = [row.metrics for row in read_metrics(metrics) if row.step]
    assert sum(row["rollout/audited_sessions"] for row in rows) > 0
    assert sum(row["rollout/audit_failures"] for row in rows) == 0
    assert len(list(metrics.parent.glob("images/*/*"))) >= 4, "the pictures of the prompts, each once"


@pytest.mark.soak
def test_the_policy_learns_to_count(example: ModuleType, tmp_path: Path) -> None:
    """The whole example with vLLM, in which the reward rises by 0.3."""
    pytest.importorskip("vllm")
    prepare_here(example.prepare)
    assert train_sync(words(example, tmp_path, "settings.toml", {"metrics.console": "off"})) == 0
    rows = [row.metrics for row in read_metrics(tmp_path / "images" / "metrics.jsonl") if row.step]
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3
    assert rows
    assert all(row["rollout/audit_failures"] == 0 for row in rows)
