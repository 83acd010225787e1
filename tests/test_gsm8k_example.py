"""The GSM8K example on made-up problems in its schema: raw files, prepared prompts, rewards."""

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.data.records import Prompt
from rl_core.errors import DataError
from rl_rollout import Generation, RewardScorer, Rollout, SamplingParams, SingleTurnLoop, resolve_reward
from rl_rollout.prompts import PromptOptions, PromptTokenizer, load_prompts

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "gsm8k"
RAW = [
    {
        "question": f"Ann has {n} apples and buys {n + 1} more. How many has she?",
        "answer": f"{n}+{n + 1}\n#### {2 * n + 1}",
    }
    for n in range(8)
]
TEST = [{"question": "What is a thousand and twelve halves?", "answer": "1,000 + 6 = <<1000+6=1006>>1,006\n#### 1,006"}]


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_prepare", FOLDER / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def raw(tmp_path: Path) -> tuple[Path, Path]:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.parquet"
    train.write_text("".join(json.dumps(row) + "\n" for row in RAW))
    pq.write_table(pa.Table.from_pylist(TEST), test)
    return train, test


class CharacterTokenizer:
    chat_template = "given"
    eos_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def __call__(self, texts: list[str], **_options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def batch_decode(self, sequences: list[list[int]], **_options: Any) -> list[str]:
        return ["".join(map(chr, sequence)) for sequence in sequences]


class ScriptedAnswers:
    """Answers every prompt with the same texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    async def generate(self, request: Any) -> list[Generation]:
        return [
            Generation(
                token_ids=np.array([ord(character) for character in text], dtype=np.int32),
                logprobs=np.zeros(len(text), dtype=np.float32),
                policy_versions=np.zeros(len(text), dtype=np.int32),
                finish_reason="stop",
            )
            for text in self.texts[: request.num_samples]
        ]


def test_prepared_splits_partition_the_problems(prepare: ModuleType, raw: tuple[Path, Path], tmp_path: Path) -> None:
    prepare.prepare(*raw, out=tmp_path / "out", num_validation=3)
    splits = {
        name: pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
        for name in ("train", "validation", "test")
    }
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 5, "validation": 3, "test": 1}
    indices = {row["extra_info"]["index"] for name in ("train", "validation") for row in splits[name]}
    assert indices == set(range(8))
    (row,) = splits["test"]
    assert row["data_source"] == "gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1006"}
    assert row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].startswith("What is a thousand and twelve halves?\n\nReason step by step")
    assert row["extra_info"]["answer"] == TEST[0]["answer"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{name}.parquet" for name in splits}


def test_preparing_again_gives_the_same_split(prepare: ModuleType, raw: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare.prepare(*raw, out=tmp_path / name, num_validation=3)
    for split in ("train", "validation", "test"):
        assert pq.read_table(tmp_path / "a" / f"{split}.parquet") == pq.read_table(tmp_path / "b" / f"{split}.parquet")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("#### 18", "18"),
        ("x\n#### -5\n", "-5"),
        ("#### 1,234,567", "1234567"),
        ("#### 2.50", "2.50"),
        ("#### .5", ".5"),
    ],
)
def test_the_final_answer_is_read(prepare: ModuleType, answer: str, number: str) -> None:
    assert prepare.final_answer(answer, where="f, line 1") == number


def test_bad_rows_name_file_line_and_field(
    prepare: ModuleType, raw: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(RAW[0]) + "\n" + json.dumps({"question": "How many?", "answer": "many"}) + "\n")
    with pytest.raises(
        DataError, match=r"bad\.jsonl, line 2, field `answer`: expected an end like '#### 18', found 'many'"
    ):
        prepare.prepare(bad, raw[1], out=tmp_path / "out", num_validation=1)
    bad.write_text(json.dumps({"answer": "#### 1"}) + "\n")
    assert prepare.main(["--train", str(bad), "--test", str(raw[1]), "--out", str(tmp_path / "out")]) == 2
    assert "line 1, field `question`: expected text, found None" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_validation_must_leave_problems_to_train_on(
    prepare: ModuleType, raw: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="has 8 problems, and 8 are requested for validation"):
        prepare.prepare(*raw, out=tmp_path / "out", num_validation=8)


def test_prompts_to_rewards(prepare: ModuleType, raw: tuple[Path, Path], tmp_path: Path) -> None:
    prepare.prepare(*raw, out=tmp_path / "out", num_validation=3)
    tokenizer = PromptTokenizer(CharacterTokenizer())
    (prompt,) = load_prompts([tmp_path / "out" / "test.parquet"], tokenizer, PromptOptions(max_tokens=200))
    assert prompt.ground_truth == "1006"
    texts = [
        r"1000 + 6 = 1006, so \boxed{1006}",
        r"\boxed{1,006}",
        "It is 1006.",
        r"\boxed{\frac{2012}{2}}",
        r"\boxed{1006.0}",
        r"first 1006, but no: \boxed{7}",
        "It is 1006, or 7",
        "I do not know.",
        r"\boxed{}",
        "**Answer: 1,006**",
        r"It is $1{,}006^\circ$.",
        r"<think>\boxed{1006}",
        r"<think>7</think>\boxed{1006\text{ apples}}",
        r"\boxed{1006 1/2}",
    ]
    scorer = RewardScorer(resolve_reward(f"{FOLDER / 'reward.py'}:reward"))
    rollout = Rollout(ScriptedAnswers(*texts), SingleTurnLoop(), scorer=scorer, decode=tokenizer.decode)  # type: ignore[arg-type]
    asyncio.run(scorer.rehearse(Prompt(uid="p", input_ids=prompt.input_ids, ground_truth="1")))
    (result,) = asyncio.run(
        rollout.run([prompt], num_sessions=len(texts), sampling=SamplingParams(max_tokens=60), seed=0)
    )
    assert result.failures == ()
    assert [trajectory.reward for trajectory in result.trajectories] == [1.0] * 5 + [0.0] * 4 + [
        1.0,
        1.0,
        0.0,
        1.0,
        0.0,
    ]
    boxed = [trajectory.reward_components["boxed"] for trajectory in result.trajectories]
    assert boxed == [1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
