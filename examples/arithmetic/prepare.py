"""Prepare the arithmetic example: prompts, a character tokenizer, and a small policy warmed up on demonstrations.

Everything is written to `prepared/` beside this file, and kept until this file, task.py or the version of a library
changes. `rl-sync-trainer sft` trains the initial policy.
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import task

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
FOLDER = Path(__file__).parent
MADE_WITH = ("torch", "megatron-core", "transformers", "tokenizers", "pyarrow", "rl-distill", "rl-sync-trainer")

DEMONSTRATIONS_PER_STEP = 128
HASTY_SHARE = 0.6
"""Share of the last demonstrations with an immediate, mostly wrong answer; the others use the scratchpad and are right.

The share grows from 0, because the scratchpad is harder to learn. The warm policy knows both ways, and its greedy
answers are immediate. GRPO learns to use the scratchpad, but barely improves it: the final accuracy is that of the
scratchpad after the warm-up."""


def make_model_folder(folder: Path, seed: int = 0) -> None:
    """Write configuration, tokenizer and random weights of a Qwen3 of one million parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=1e4,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """An example on these problems, with its own policy.

    Attributes:
        name: Name of the example.
        folder: Output folder.
        script: The file that describes the example; if it changes, the example is prepared again.
        make_model: Writes the untrained policy into a folder, given the folder and a seed.
        steps: Warm-up steps.
        learning_rate: Peak learning rate of the warm-up; it decays to 0 at the last step.
        duration: Duration of the preparation, as text.
    """

    name: str
    folder: Path
    script: Path
    make_model: Callable[[Path, int], None]
    steps: int
    learning_rate: float
    duration: str


ARITHMETIC = Preparation(
    name="arithmetic",
    folder=FOLDER / "prepared",
    script=Path(__file__),
    make_model=make_model_folder,
    steps=500,
    learning_rate=2e-3,
    duration="about 90 s on two cores",
)


def fingerprint(example: Preparation = ARITHMETIC) -> str:
    """Hash of everything that the prepared folder depends on."""
    digest = hashlib.sha256()
    for file in {FOLDER / "task.py": None, FOLDER / "warm-up.toml": None, Path(__file__): None, example.script: None}:
        digest.update(file.read_bytes())
    for package in MADE_WITH:
        try:
            digest.update(f"{package}=={version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"{package} not installed\n".encode())
    return digest.hexdigest()


def is_prepared(example: Preparation = ARITHMETIC) -> bool:
    """Return True if the folder exists, is complete and is up to date."""
    try:
        made: dict[str, str] = json.loads((example.folder / "fingerprint.json").read_text())
    except (OSError, ValueError):
        return False
    return made.get("fingerprint") == fingerprint(example)


def prepare(seed: int = 0, example: Preparation = ARITHMETIC) -> None:
    """Write a temporary folder and rename it, so that an interrupted preparation leaves no incomplete folder.

    Args:
        seed: Seed of the random weights and of the demonstrations' order. The problems do not depend on it.
        example: The example to prepare.
    """
    started = time.perf_counter()
    say(f"{example.name}: preparing prompts, tokenizer and warm policy in {example.folder} (once; {example.duration})")
    part = example.folder.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    problems = task.split_problems()
    for split, members in problems.items():
        write_prompts(part / f"{split}.parquet", members)
    example.make_model(part / "untrained", seed)
    warm_up(part, problems["train"], seed, example)
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint(example)}))
    shutil.rmtree(example.folder, ignore_errors=True)
    part.rename(example.folder)
    say(f"{example.name}: prepared in {time.perf_counter() - started:.0f} s")


def write_prompts(file: Path, problems: list[task.Problem]) -> None:
    """Write problems as Parquet, with prompts as chat messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": problem.question}],
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "operator": problem.operator},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per character, and a chat template that ends the question with "="."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [task.PAD_TOKEN, task.END_TOKEN, *task.CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=task.PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=task.PAD_TOKEN, eos_token=task.END_TOKEN, padding_side="left"
    )
    wrapped.chat_template = task.CHAT_TEMPLATE
    return wrapped


def warm_up(part: Path, problems: list[task.Problem], seed: int, example: Preparation) -> None:
    """Train on demonstrations with `rl-sync-trainer sft`, and keep the policy of its last checkpoint.

    Raises:
        RuntimeError: The training failed; it has said why.
        KeyboardInterrupt: The user stopped it.
    """
    from rl_sync_trainer.main import main as trainer

    write_demonstrations(part / "demonstrations.parquet", problems, seed, example)
    changes = {
        "run.directory": part,
        "run.seed": seed,
        "policy.path": part / "untrained",
        "prompts.train": part / "demonstrations.parquet",
        "sft.batch_size": DEMONSTRATIONS_PER_STEP,
        "optimizer.learning_rate": example.learning_rate,
        "optimizer.decay_steps": example.steps,
    }
    status = trainer(["sft", str(FOLDER / "warm-up.toml"), *(f"--{name}={value}" for name, value in changes.items())])
    if status:
        raise KeyboardInterrupt if status > 128 else RuntimeError(f"the warm-up ended with status {status}.")
    (part / "warm-up" / "checkpoints" / f"step_{example.steps}" / "policy").rename(part / "policy")
    for made in ("warm-up", "untrained"):
        shutil.rmtree(part / made)


def write_demonstrations(file: Path, problems: list[task.Problem], seed: int, example: Preparation) -> None:
    """Write the demonstrations in the order of training: different problems in a step, each answered in one way."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(seed)
    rows = []
    for step in range(1, example.steps + 1):
        chosen = random.choice(len(problems), size=DEMONSTRATIONS_PER_STEP, replace=False)
        is_hasty = random.random(len(chosen)) < HASTY_SHARE * step / example.steps
        for problem, hasty in zip((problems[index] for index in chosen), is_hasty, strict=True):
            answer = problem.hasty_answer if hasty else problem.scratchpad
            rows.append({"prompt": f"{problem.question}=", "answer": answer})
    pq.write_table(pa.Table.from_pylist(rows), file)


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


def main(example: Preparation = ARITHMETIC, description: str | None = __doc__) -> None:
    """Prepare the example if it is missing or out of date."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="prepare again even if nothing has changed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the warm policy; to change it, add --force")
    options = parser.parse_args()
    if options.force or not is_prepared(example):
        prepare(options.seed, example)
    else:
        say(f"{example.name}: {example.folder} is up to date")


if __name__ == "__main__":
    main()
