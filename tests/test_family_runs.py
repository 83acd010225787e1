"""Each family of tests/support/families.py in a short run of each trainer, with the transformers engine."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES, make_family
from tiny_run import TinyRun, example_module, make_tiny_run, train_here

from rl_async_trainer.main import main as train_async

pytestmark = pytest.mark.soak
families = pytest.mark.parametrize("name", list(FAMILIES))


@pytest.fixture
def run(name: str, tmp_path: Path) -> TinyRun:
    """A run of the family, with the tiny policy's tokenizer."""
    run = make_tiny_run(tmp_path)
    policy, tokenizer = run.folder / "policy", example_module("prepare").make_tokenizer()
    shutil.rmtree(policy)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_family(name, policy, vocab_size=32, initializer_range=0.05, **ids)  # its responses differ
    tokenizer.save_pretrained(policy)
    return run


def check(run: TinyRun, *, steps: int) -> None:
    """Check a finished run: its numbers, and that the weights it served were proven."""
    rows = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "actor/grad_norm" in row]
    assert [row["step"] for row in trained] == list(range(1, steps + 1))
    assert all(0 < row["actor/grad_norm"] < torch.inf for row in trained)


@families
@pytest.mark.parametrize("trainer", ["synchronous", "asynchronous"])
def test_a_family_trains(trainer: str, run: TinyRun) -> None:
    settings = {"trainer__steps": 3, "trainer__checkpoint_every": 3, "trainer__validate_every": 3}
    if trainer == "synchronous":
        assert train_here(run, **settings) == 0
    else:
        assert train_async(run.train_words(roles__placement="inline", **settings)) == 0
    check(run, steps=3)
