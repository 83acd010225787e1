"""Prepare the tools example: prompts, a tokenizer, and a small policy that knows two ways to answer.

Everything is written to `prepared/` beside this file, and kept until this file, task.py or the version of a library
changes. The Megatron learner that later runs GRPO also trains the initial policy.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import task

if TYPE_CHECKING:
    from rl_core import Trajectory

FOLDER = Path(__file__).parent
PREPARED = FOLDER / "prepared"
MADE_WITH = ("torch", "megatron-core", "transformers", "tokenizers", "pyarrow", "rl-distill")

WARM_UP_STEPS = 250
DEMONSTRATIONS_PER_STEP = 128
HASTY_SHARE = 0.6
"""Share of demonstrations with an immediate, wrong answer; the others call the calculator. The warm policy knows both
ways, and its greedy answers are immediate. GRPO learns to call the calculator."""


def fingerprint() -> str:
    """Hash of everything that the prepared folder depends on."""
    digest = hashlib.sha256()
    for name in ("task.py", "prepare.py"):
        digest.update((FOLDER / name).read_bytes())
    for package in MADE_WITH:
        digest.update(f"{package}=={version(package)}\n".encode())
    return digest.hexdigest()


def is_prepared() -> bool:
    """Return True if the folder exists, is complete and is up to date."""
    try:
        made: dict[str, str] = json.loads((PREPARED / "fingerprint.json").read_text())
    except (OSError, ValueError):
        return False
    return made.get("fingerprint") == fingerprint()


def prepare() -> None:
    """Write a temporary folder and rename it, so that an interrupted preparation leaves no incomplete folder."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
    started = time.perf_counter()
    say(f"tools: preparing prompts, tokenizer and warm policy in {PREPARED} (once; about a minute on two cores)")
    part = PREPARED.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    problems = task.split_problems()
    for split, members in problems.items():
        write_prompts(part / f"{split}.parquet", members)
    make_model_folder(part / "untrained")
    warm_up(part, problems["train"])
    shutil.rmtree(part / "untrained")
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint()}))
    shutil.rmtree(PREPARED, ignore_errors=True)
    part.rename(PREPARED)
    say(f"tools: prepared in {time.perf_counter() - started:.0f} s")


def write_prompts(file: Path, problems: list[task.Problem]) -> None:
    """Write problems as Parquet, with prompts as chat messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "products",
            "prompt": [{"role": "user", "content": problem.question}],
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
        }
        for problem in problems
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per character, one for the tools, and three for the fixed parts of a call."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    parts = [task.TOOLS, task.CALL, task.BETWEEN, task.CLOSE]
    tokens = [task.PAD_TOKEN, task.END_TOKEN, *parts, *task.CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=task.PAD_TOKEN))
    pattern = "|".join(map(re.escape, parts)) + r"|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=task.PAD_TOKEN, eos_token=task.END_TOKEN, padding_side="left"
    )
    wrapped.chat_template = task.CHAT_TEMPLATE
    return wrapped


def make_model_folder(folder: Path) -> None:
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
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_up(part: Path, problems: list[task.Problem]) -> None:
    """Train on demonstrations with supervised learning, and write the policy's folder."""
    from rl_core import Batch
    from rl_distill.learner import LearnerOptions
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective, with_loss_weights

    options = LearnerOptions(
        learning_rate=4e-3,
        warmup_steps=20,
        decay_steps=WARM_UP_STEPS,
        betas=(0.9, 0.99),
        clip_grad=1.0,
        micro_batch_tokens=8192,
        num_threads=2,
    )
    learner = MegatronLearner(part / "untrained", options)
    tokenizer = make_tokenizer()
    hasty = Batch.from_trajectories([demonstration(tokenizer, problem, asks=False) for problem in problems])
    asking = Batch.from_trajectories([demonstration(tokenizer, problem, asks=True) for problem in problems])
    random = np.random.default_rng(0)
    started = time.perf_counter()
    for step in range(1, WARM_UP_STEPS + 1):
        rows = random.choice(len(hasty), size=DEMONSTRATIONS_PER_STEP, replace=False)
        is_hasty = random.random(len(rows)) < HASTY_SHARE
        drawn = Batch.concat([hasty.select(rows[is_hasty]), asking.select(rows[~is_hasty])])
        result = learner.train_step(with_loss_weights(drawn, aggregation="token-mean"), supervised_objective)
        if step % 50 == 0:
            took = time.perf_counter() - started
            rest = took / step * (WARM_UP_STEPS - step)
            say(f"  warm-up {step}/{WARM_UP_STEPS}, loss {result.loss:.3f}, {took:.0f} s, {rest:.0f} s to go")
    checkpoint = part / "checkpoint"
    checkpoint.mkdir()
    learner.save(checkpoint)
    learner.close()
    (checkpoint / "policy").rename(part / "policy")
    shutil.rmtree(checkpoint)


def demonstration(tokenizer: Any, problem: task.Problem, *, asks: bool) -> "Trajectory":
    """Return a problem with an immediate answer, or with a call of the calculator, whose result is not trained."""
    from rl_core import Trajectory

    if asks:
        parts = [(f"{problem.call}<eos>", True), (f"[{problem.answer}]", False), (f"{problem.answer}<eos>", True)]
    else:
        parts = [(f"{problem.hasty_answer}<eos>", True)]
    shown = f"{task.TOOLS}{problem.question}="
    encoded = [(tokenizer(text)["input_ids"], trained) for text, trained in [(shown, False), *parts]]
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in encoded])
    return Trajectory(
        prompt_uid=problem.question,
        session_index=0,
        input_ids=tokens,
        loss_mask=np.concatenate([np.full(len(ids), trained) for ids, trained in encoded]),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        policy_versions=np.full(len(tokens), -1, dtype=np.int32),
    )


def say(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    print(line, flush=True)


def main() -> None:
    """Prepare the example if it is missing or out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="prepare again even if nothing has changed")
    if parser.parse_args().force or not is_prepared():
        prepare()
    else:
        say(f"tools: {PREPARED} is up to date")


if __name__ == "__main__":
    main()
