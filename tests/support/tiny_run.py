"""A training run for tests: a model of 20,000 parameters, problems, settings, and a reward that training improves."""

import importlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ARITHMETIC = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
NUM_PROBLEMS = {"train": 32, "validation": 8, "test": 4}
PROMPTS_PER_STEP = 4
GROUP_SIZE = 4
REWARDS_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
REWARDS_BEFORE_STEP_1 = NUM_PROBLEMS["validation"] + NUM_PROBLEMS["test"]
"""Reward calls to evaluate the untrained policy; the rehearsal imports the reward's file separately."""

REWARD = '''"""Share of even digits; from a given call on it waits, so that a test can stop the run at a known place."""

import os
import signal
import threading
import time
from pathlib import Path

HOLD_AFTER = int(os.environ.get("TINY_RUN_HOLD_AFTER", 10**9))
FOLDER = Path(__file__).parent
lock = threading.Lock()
num_calls = 0


def reward(sample):
    global num_calls
    with lock:
        num_calls += 1
        number = num_calls
    if number > HOLD_AFTER:
        (FOLDER / "held").touch()
        if number == HOLD_AFTER + 1 and "TINY_RUN_SIGNAL" in os.environ:
            os.kill(os.getpid(), int(os.environ["TINY_RUN_SIGNAL"]))
        while not (FOLDER / "released").exists():
            time.sleep(0.01)
    text = sample.response_text
    return sum(character in "02468" for character in text) / max(len(text), 1)
'''

SETTINGS = """[run]
name = "tiny"
directory = "{folder}/runs"

[policy]
path = "{folder}/policy"

[prompts]
train = "{folder}/train.parquet"
validation = "{folder}/validation.parquet"
test = "{folder}/test.parquet"
max_tokens = 8

[reward]
function = "{folder}/reward.py:reward"

[rollout]
audit_share = 1.0
engine = "transformers"
prompts_per_step = {prompts_per_step}
group_size = {group_size}
max_response_tokens = 8

[optimizer]
learning_rate = 3e-3
micro_batch_tokens = 128
num_threads = 1
products = "torch"

[vllm]
max_num_seqs = 64
kv_cache_gib = 0.25
num_threads = 1

[trainer]
steps = 4
validate_every = 2
checkpoint_every = 2

[metrics]
console = "lines"
strict = true
report = false
details_every = 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRun:
    """Inputs of a run in their own folder.

    Attributes:
        folder: Folder with policy/, the problems, reward.py and settings.toml; the run's folder is runs/tiny.
    """

    folder: Path

    @property
    def settings_file(self) -> Path:
        """Path of the settings file."""
        return self.folder / "settings.toml"

    @property
    def run_folder(self) -> Path:
        """Folder of the run."""
        return self.folder / "runs" / "tiny"

    def train_words(self, *words: str, **settings: Any) -> list[str]:
        """Return arguments of `rl-sync-trainer`; `trainer__steps=3` becomes `--trainer.steps=3`."""
        changes = [f"--{name.replace('__', '.')}={written(value)}" for name, value in settings.items()]
        return ["train", str(self.settings_file), *words, *changes]

    def replace_in_settings(self, changes: Mapping[str, str]) -> None:
        """Replace lines of the settings file."""
        text = self.settings_file.read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        self.settings_file.write_text(text)


def train_here(run: TinyRun, *words: str, **settings: Any) -> int:
    """Run the command in this process, which saves its imports; return the exit status."""
    import torch

    from rl_sync_trainer.main import main

    num_threads = torch.get_num_threads()
    (run.folder / "released").unlink(missing_ok=True)
    try:
        return main(run.train_words(*words, **settings))
    finally:
        (run.folder / "released").touch()
        torch.set_num_threads(num_threads)


def written(value: Any) -> str:
    """Return a value as on the command line."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def make_tiny_run(folder: Path) -> TinyRun:
    """Write everything that a run needs into a folder."""
    prepare, task = example_module("prepare"), example_module("task")
    problems = task.split_problems()
    for split, count in NUM_PROBLEMS.items():
        prepare.write_prompts(folder / f"{split}.parquet", problems[split][:count])
    make_tiny_policy(folder / "policy", prepare.make_tokenizer())
    (folder / "reward.py").write_text(REWARD)
    settings = SETTINGS.format(folder=folder, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
    (folder / "settings.toml").write_text(settings)
    return TinyRun(folder=folder)


def copy_tiny_run(source: TinyRun, folder: Path) -> TinyRun:
    """Copy the inputs to another folder, without the runs."""
    shutil.copytree(
        source.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "released", "held")
    )
    text = source.settings_file.read_text()
    (folder / "settings.toml").write_text(text.replace(str(source.folder), str(folder)))
    return TinyRun(folder=folder)


def make_tiny_policy(
    folder: Path, tokenizer: Any, *, vocab_size: int = 32, max_positions: int = 64, seed: int = 0
) -> None:
    """Write a random Qwen3 with a tied head, in float32, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def example_module(name: str) -> ModuleType:
    """Import a module of the arithmetic example, whose scripts import their neighbours by name."""
    if name in sys.modules:
        return sys.modules[name]
    if str(ARITHMETIC) not in sys.path:
        sys.path.append(str(ARITHMETIC))
    return importlib.import_module(name)
