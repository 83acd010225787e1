"""Prepare the self-distillation example: a policy that answers well only after a demonstration, and its prompts.

Everything is written to `prepared/` beside this file, and kept until this file, the arithmetic example's preparation or
the version of a library changes. The policy learns to answer at once, and mostly wrong, if it reads only the problem,
and with a scratchpad if a solved problem comes before. Each problem has such a demonstration as a column.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
sys.path += [str(FOLDER.parent), str(FOLDER.parent / "arithmetic")]  # its files import each other
SOURCE: Any = importlib.import_module("arithmetic.prepare")

PREPARED = FOLDER / "prepared"
STEPS, LEARNING_RATE = 500, 4e-3
SIZES = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 288}
DEMONSTRATED = 0.5
"""Share of the warm-up's rows that begin with a demonstration."""
HASTY = 0.95
"""Share of the last rows without a demonstration that answer at once. It grows from 0, so that the policy learns the
scratchpad first."""
SEED = 0


def demonstration(problem: Any) -> str:
    """Return a solved problem as the beginning of a prompt, such as "12+34=;6,4:46,"."""
    return f"{problem.question}={problem.scratchpad},"


def write_prompts(file: Path, problems: Sequence[Any], shown: Sequence[Any]) -> None:
    """Write problems as JSON lines, each with the demonstration of another problem."""
    chosen = random.Random(SEED)
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": problem.question}],
            "reward_model": {"ground_truth": problem.answer},
            "demonstration": demonstration(chosen.choice(shown)),
        }
        for problem in problems
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def warm_up_row(problem: Any, shown: Sequence[Any], hasty: float, chosen: random.Random) -> tuple[str, str]:
    """Return a prompt and an answer of the warm-up.

    Args:
        problem: The problem.
        shown: Problems that can be demonstrated.
        hasty: Share of the prompts without a demonstration that are answered at once.
        chosen: Source of random numbers.
    """
    if chosen.random() < DEMONSTRATED:
        return f"{demonstration(chosen.choice(shown))}{problem.question}=", problem.scratchpad
    return f"{problem.question}=", problem.hasty_answer if chosen.random() < hasty else problem.scratchpad


def warm_up(untrained: Path, checkpoint: Path, problems: Sequence[Any], *, steps: int) -> None:
    """Train with supervised learning, and write a checkpoint of the learner."""
    from rl_distill.learner import LearnerOptions
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    options = LearnerOptions(
        learning_rate=LEARNING_RATE,
        warmup_steps=min(20, steps - 1),
        decay_steps=steps,
        betas=(0.9, 0.99),
        micro_batch_tokens=8192,
        num_threads=2,
    )
    learner, chosen, started = MegatronLearner(untrained, options), random.Random(SEED), time.perf_counter()
    for step in range(1, steps + 1):
        drawn = chosen.sample(problems, SOURCE.DEMONSTRATIONS_PER_STEP)
        rows = [warm_up_row(problem, problems, HASTY * step / steps, chosen) for problem in drawn]
        result = learner.train_step(batch_of(rows), supervised_objective)
        if step % 50 == 0 or step == steps:
            say(f"  warm-up {step}/{steps}, loss {result.loss:.3f}, {time.perf_counter() - started:.0f} s")
    learner.save(checkpoint)
    learner.close()


def batch_of(rows: Sequence[tuple[str, str]]) -> Any:
    """Return prompts and answers as a batch that trains the answers."""
    from rl_core import Batch, Ragged, RowKey
    from rl_distill.objectives import with_loss_weights

    tokenizer = SOURCE.make_tokenizer()
    prompts, answers = (tokenizer(list(texts))["input_ids"] for texts in zip(*rows, strict=True))
    ids = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(ids, prompts, strict=True)]
    columns = {"input_ids": Ragged.from_rows(ids, dtype="int32"), "loss_mask": Ragged.from_rows(masks, dtype="bool")}
    batch = Batch([RowKey(str(row), 0, 0) for row in range(len(ids))], columns)
    return with_loss_weights(batch, aggregation="token-mean")


def fingerprint() -> str:
    """Hash of everything that the prepared folder depends on."""
    return hashlib.sha256(SOURCE.fingerprint().encode() + Path(__file__).read_bytes()).hexdigest()


def is_prepared() -> bool:
    """Return True if the folder exists, is complete and is up to date."""
    try:
        made: dict[str, str] = json.loads((PREPARED / "fingerprint.json").read_text())
    except (OSError, ValueError):
        return False
    return made.get("fingerprint") == fingerprint()


def prepare(*, steps: int = STEPS) -> None:
    """Write a temporary folder and rename it, so that an interrupted preparation leaves no incomplete folder."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
    from transformers import Qwen3Config, Qwen3ForCausalLM

    started = time.perf_counter()
    say(f"self-distillation: preparing prompts and policy in {PREPARED} (once; about a minute on two cores)")
    part = PREPARED.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "checkpoint").mkdir(parents=True)
    problems = SOURCE.task.split_problems()
    for split, members in problems.items():
        write_prompts(part / f"{split}.jsonl", members, problems["train"])
    SOURCE.make_model_folder(part / "untrained")
    config = Qwen3Config.from_pretrained(part / "untrained").to_dict()
    Qwen3ForCausalLM(Qwen3Config(**{**config, "layer_types": None, **SIZES})).save_pretrained(part / "untrained")
    warm_up(part / "untrained", part / "checkpoint", problems["train"], steps=steps)
    (part / "checkpoint" / "policy").rename(part / "policy")
    shutil.rmtree(part / "checkpoint")
    shutil.rmtree(part / "untrained")
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint()}))
    shutil.rmtree(PREPARED, ignore_errors=True)
    part.rename(PREPARED)
    say(f"self-distillation: prepared in {time.perf_counter() - started:.0f} s")


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
        say(f"self-distillation: {PREPARED} is up to date")


if __name__ == "__main__":
    main()
