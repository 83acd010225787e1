"""Prepare the distillation example: a teacher that is good at arithmetic, and a small student.

Everything is written to `prepared/` beside this file, and kept until this file, the arithmetic example's preparation or
the version of a library changes. The Megatron learner trains both models on demonstrations: the teacher until its
answers are right, the student until its responses have the form of an answer.
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import arithmetic
import numpy as np

FOLDER = Path(__file__).parent
PREPARED = FOLDER / "prepared"
SOURCE: Any = arithmetic.load("prepare")
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A model and its training on demonstrations.

    Attributes:
        name: Name of the model's folder.
        steps: Supervised steps.
        learning_rate: Peak learning rate; it decays to 0 at the last step.
        hasty: Share of the last demonstrations with an immediate, mostly wrong answer; others use a scratchpad and are
            right. The share grows from 0, so the model learns the scratchpad first.
        slips: Share of the answers' digits that are replaced at random and not trained. The model thereby learns to
            continue correctly after mistakes, which a teacher needs to score the student's answers.
        sizes: Changes to the configuration of the arithmetic example's model of one million parameters.
    """

    name: str
    steps: int
    learning_rate: float
    hasty: float = 0.0
    slips: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)


TEACHER = Lesson(name="teacher", steps=450, learning_rate=4e-3, slips=0.1)
STUDENT = Lesson(
    name="student",
    steps=900,
    learning_rate=4e-3,
    hasty=0.95,
    sizes={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256},
)


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


def prepare(lessons: Sequence[Lesson] = (TEACHER, STUDENT)) -> None:
    """Write a temporary folder and rename it, so that an interrupted preparation leaves no incomplete folder."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: spinning threads starve each other
    started = time.perf_counter()
    say(f"distillation: preparing prompts, teacher and student in {PREPARED} (once; about three minutes on two cores)")
    part = PREPARED.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    problems = SOURCE.task.split_problems()
    for split, members in problems.items():
        SOURCE.write_prompts(part / f"{split}.parquet", members)
    for lesson in lessons:
        make_model(part / lesson.name, lesson, problems["train"])
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint()}))
    shutil.rmtree(PREPARED, ignore_errors=True)
    part.rename(PREPARED)
    say(f"distillation: prepared in {time.perf_counter() - started:.0f} s")


def make_model(folder: Path, lesson: Lesson, problems: list[Any]) -> None:
    """Train a model on demonstrations of the problems, and write its folder."""
    untrained, checkpoint = folder.with_name("untrained"), folder.with_name("checkpoint")
    SOURCE.make_model_folder(untrained)
    resize(untrained, lesson.sizes)
    checkpoint.mkdir()
    teach(untrained, checkpoint, lesson, problems)
    (checkpoint / "policy").rename(folder)
    shutil.rmtree(checkpoint)
    shutil.rmtree(untrained)


def resize(folder: Path, sizes: dict[str, int]) -> None:
    """Change the sizes of a model folder, and write random weights of these sizes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if not sizes:
        return
    config = {**Qwen3Config.from_pretrained(folder).to_dict(), "layer_types": None, "dtype": "float32", **sizes}
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(folder)


def teach(untrained: Path, checkpoint: Path, lesson: Lesson, problems: list[Any]) -> None:
    """Train with supervised learning, and write a checkpoint of the learner."""
    from rl_distill.learner import LearnerOptions
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective, with_loss_weights

    options = LearnerOptions(
        learning_rate=lesson.learning_rate,
        warmup_steps=min(20, lesson.steps - 1),
        decay_steps=lesson.steps,
        betas=(0.9, 0.99),
        micro_batch_tokens=8192,
        num_threads=2,
    )
    learner = MegatronLearner(untrained, options)
    hasty = demonstrations(problems, lambda problem: problem.hasty_answer)
    right = demonstrations(problems, lambda problem: problem.scratchpad)
    random = np.random.default_rng(SEED)
    started = time.perf_counter()
    for step in range(1, lesson.steps + 1):
        batch = with_slips(draw(hasty, right, lesson.hasty * step / lesson.steps, random), lesson.slips, random)
        result = learner.train_step(with_loss_weights(batch, aggregation="token-mean"), supervised_objective)
        if step % 50 == 0 or step == lesson.steps:
            took = time.perf_counter() - started
            say(f"  {lesson.name} {step}/{lesson.steps}, loss {result.loss:.3f}, {took:.0f} s")
    learner.save(checkpoint)
    learner.close()


def demonstrations(problems: list[Any], answer: Any) -> Any:
    """Return all problems with one kind of answer, as trajectories that train only the answer."""
    from rl_core import Batch, Trajectory

    tokenizer = SOURCE.make_tokenizer()
    end = tokenizer.eos_token_id
    questions = tokenizer([f"{problem.question}=" for problem in problems])["input_ids"]
    answers = tokenizer([answer(problem) for problem in problems])["input_ids"]
    trajectories = []
    for index, (question, response) in enumerate(zip(questions, answers, strict=True)):
        tokens = np.asarray([*question, *response, end], dtype=np.int32)
        trained = np.arange(len(tokens)) >= len(question)
        trajectories.append(
            Trajectory(
                prompt_uid=str(index),
                session_index=0,
                input_ids=tokens,
                loss_mask=trained,
                rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
                policy_versions=np.full(len(tokens), -1, dtype=np.int32),
            )
        )
    return Batch.from_trajectories(trajectories)


def draw(hasty: Any, right: Any, share: float, random: np.random.Generator) -> Any:
    """Draw the demonstrations of one step: different problems, each answered in one of the two ways."""
    from rl_core import Batch

    rows = random.choice(len(right), size=SOURCE.DEMONSTRATIONS_PER_STEP, replace=False)
    is_hasty = random.random(len(rows)) < share
    parts = [hasty.select(rows[is_hasty]), right.select(rows[~is_hasty])]
    return Batch.concat([part for part in parts if len(part)])


def with_slips(batch: Any, share: float, random: np.random.Generator) -> Any:
    """Replace a share of the answers' digits at random, and exclude these from training."""
    from rl_core import Ragged

    if not share:
        return batch
    digits = np.asarray(SOURCE.make_tokenizer().convert_tokens_to_ids(list("0123456789")), dtype=np.int32)
    tokens, trained = batch.ragged("input_ids"), batch.ragged("loss_mask")
    slips = trained.values & np.isin(tokens.values, digits) & (random.random(len(tokens.values)) < share)
    shown = np.where(slips, random.choice(digits, len(slips)), tokens.values)
    return batch.with_columns(
        {
            "input_ids": Ragged(shown, tokens.offsets),
            "loss_mask": Ragged(trained.values & ~slips, trained.offsets),
        }
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
        say(f"distillation: {PREPARED} is up to date")


if __name__ == "__main__":
    main()
