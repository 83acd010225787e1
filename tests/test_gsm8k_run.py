"""The GSM8K example's settings in the trainer, with made-up problems and a tiny model of characters."""

import importlib.util
import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_tiny_policy

from rl_metrics.trackers.jsonl import read_generations, read_metrics
from rl_sync_trainer.main import main

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "gsm8k"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}{% set thought = '()' %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{{ thought }}{% endif %}"
)
PROBLEMS = [
    {
        "question": f"Ann has {count} apples and buys {count + 1} more. How many has she?",
        "answer": f"{count} + {count + 1} = <<{count}+{count + 1}={2 * count + 1}>>\n#### {2 * count + 1}",
    }
    for count in range(24)
]


def text_tokenizer() -> Any:
    """Return a tokenizer with one token for each printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def prepare_problems(folder: Path) -> None:
    """Run the example's preparation on raw files."""
    spec = importlib.util.spec_from_file_location("gsm8k_prepare_for_run", FOLDER / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, rows in (("train", PROBLEMS[:20]), ("test", PROBLEMS[20:])):
        (folder / f"raw-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module.prepare(folder / "raw-train.jsonl", folder / "raw-test.jsonl", out=folder, num_validation=4)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return the arguments that train with the example's settings, reduced for a small CPU run."""
    prepare_problems(tmp_path)
    make_tiny_policy(tmp_path / "policy", text_tokenizer(), vocab_size=128, max_positions=256)
    changes = {
        "run.directory": tmp_path / "runs",
        "policy.path": tmp_path / "policy",
        **{f"prompts.{split}": tmp_path / f"{split}.parquet" for split in ("train", "validation", "test")},
        "prompts.max_tokens": 200,
        "reward.function": f"{FOLDER / 'reward.py'}:reward",
        "rollout.engine": "transformers",
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 12,
        "vllm.dtype": "float32",
        "optimizer.dtype": "float32",
        "optimizer.num_threads": 1,
        "trainer.steps": 2,
        "metrics.strict": "true",
        "metrics.console": "off",
    }
    return ["train", str(FOLDER / "settings.toml"), *(f"--{name}={value}" for name, value in changes.items())]


def test_made_up_problems_through_the_trainer(words: list[str], tmp_path: Path) -> None:
    assert main(words) == 0
    run = tmp_path / "runs" / "gsm8k"
    first, *steps = read_metrics(run / "metrics.jsonl")
    assert [row.step for row in steps] == [1, 2]
    assert {"val-core/gsm8k/reward/mean@1", "val-aux/gsm8k/accuracy/mean@1"} <= first.metrics.keys()
    for row in steps:
        assert [name for name, value in row.metrics.items() if not math.isfinite(value)] == []
        assert row.metrics["rollout/failed_sessions"] == 0
        assert {"reward/accuracy/mean", "reward/boxed/mean", "actor/kl_loss"} <= row.metrics.keys()
        assert row.metrics["training/rollout_probs_diff_max"] < 1e-4
    written = read_generations(run / "generations.jsonl")[-1]
    assert (written.step, written.name) == (2, "test/generations")
    assert sorted(int(sample.ground_truth) for sample in written.samples) == [41, 43, 45, 47]
    assert all(sample.input.endswith("within \\boxed{}.<assistant>()") for sample in written.samples)
