"""Prepare the workloads long_tail and long_prompt: prompts, and policies of the arithmetic shape that count down.

Everything is written to `prepared/` beside this file, and kept until this file, the policy's shape or tokenizer, or the
version of a library changes.
"""

import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_core import Batch

FOLDER = Path(__file__).parent
PREPARED = FOLDER / "prepared"
SHAPE = FOLDER.parent / "examples" / "arithmetic" / "prepared" / "policy"
SHARED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MADE_WITH = ("torch", "megatron-core", "transformers", "rl-distill")

NUM_PROBLEMS = 8192
MEDIAN_COUNT = 5.0
LOG_DEVIATION = 0.95
LARGEST_COUNT = 48
TOKENS_PER_NUMBER = 4
"""Tokens per number: three digits, and a comma or the end token."""

LARGEST_COUNT_AFTER_CONTEXT = 16
NUMBERS_OF_CONTEXT = 63
"""Unrelated numbers before each question of long_prompt, which then has 256 tokens."""

MAX_POSITIONS = 512
"""Positions of the policies; the shape's own are too few for a prompt of 256 tokens and a response of 64."""

WARM_UP_STEPS = {"long_tail": 160, "long_prompt": 80}
DEMONSTRATIONS_PER_STEP = {"long_tail": 256, "long_prompt": 64}
"""Warm-up by workload; long_prompt continues from the policy of long_tail."""

SHORTENED_SHARE = 0.35
"""Share of demonstrations that end one number early. GRPO unlearns this, which gives a curve to compare."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Count down to the hundred.

    Attributes:
        start: 101 to 947; its last two digits are below 48 and give the number of further numbers.
        context: Text before the question.
    """

    start: int
    context: str = ""

    @property
    def question(self) -> str:
        """Such as "503="."""
        return f"{self.context}{self.start}="

    @property
    def answer(self) -> str:
        """Such as "503,502,501,500"."""
        return ",".join(map(str, range(self.start, self.start // 100 * 100 - 1, -1)))

    @property
    def shortened(self) -> str:
        """The answer without its last number."""
        return self.answer.rpartition(",")[0]


def draw_problems(num_problems: int, *, seed: int, numbers_of_context: int = 0) -> list[Problem]:
    """Draw problems with log-normal counts: median 5 numbers (20 tokens), maximum 48 (192 tokens) or 16 (64 tokens).

    Args:
        num_problems: Number of problems.
        seed: Seed of the draws.
        numbers_of_context: Numbers, each with a comma, before each question; the maximum count is then 16.
    """
    draws = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < num_problems:
        count = round(draws.lognormvariate(math.log(MEDIAN_COUNT), LOG_DEVIATION))
        if 2 <= count <= (LARGEST_COUNT_AFTER_CONTEXT if numbers_of_context else LARGEST_COUNT):
            context = "".join(f"{draws.randint(100, 999)}," for _ in range(numbers_of_context))
            problems.append(Problem(draws.randint(1, 9) * 100 + count - 1, context))
    return problems


def fingerprint() -> str:
    """Hash of everything that the prepared folder depends on."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in SHARED_FILES:
        digest.update((SHAPE / name).read_bytes())
    for package in MADE_WITH:
        try:
            digest.update(f"{package}=={version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"{package} not installed\n".encode())
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
    started = time.perf_counter()
    print(f"making prompts and policies in {PREPARED} (once; about 4 minutes on two cores)", flush=True)
    part = PREPARED.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    shape = SHAPE
    for workload, numbers_of_context in (("long_tail", 0), ("long_prompt", NUMBERS_OF_CONTEXT)):
        folder = part / workload
        folder.mkdir(parents=True)
        problems = draw_problems(NUM_PROBLEMS, seed=0, numbers_of_context=numbers_of_context)
        rows = [{"data_source": "counting", "prompt": p.question, "answer": p.answer} for p in problems]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        warm_up(workload, folder, problems, shape)
        shape = folder / "policy"
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint()}))
    shutil.rmtree(PREPARED, ignore_errors=True)
    part.rename(PREPARED)
    print(f"prepared in {time.perf_counter() - started:.0f} s", flush=True)


def warm_up(workload: str, part: Path, problems: list[Problem], begin: Path) -> None:
    """Train on demonstrations with supervised learning, and write the policy's folder.

    Args:
        workload: Name of the workload.
        part: Parent of the written folder `policy/`.
        problems: Problems to draw from.
        begin: Folder of the initial policy; without weights in it, they are random.
    """
    import numpy as np

    from rl_distill.learner import LearnerOptions
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective, with_loss_weights

    steps = WARM_UP_STEPS[workload]
    options = LearnerOptions(
        learning_rate=3e-3,
        warmup_steps=20,
        decay_steps=steps,
        betas=(0.9, 0.99),
        clip_grad=1.0,
        micro_batch_tokens=8192,
        num_threads=2,
    )
    learner = MegatronLearner(json.loads((begin / "config.json").read_text()) if begin == SHAPE else begin, options)
    draws = np.random.default_rng(0)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        rows = draws.choice(len(problems), size=DEMONSTRATIONS_PER_STEP[workload], replace=False)
        is_short = draws.random(len(rows)) < SHORTENED_SHARE
        drawn = [problems[row] for row in rows]
        answers = [p.shortened if short else p.answer for p, short in zip(drawn, is_short, strict=True)]
        batch = with_loss_weights(demonstrations(drawn, answers), aggregation="token-mean")
        result = learner.train_step(batch, supervised_objective)
        if step % 20 == 0:
            took = time.perf_counter() - started
            rest = took / step * (steps - step)
            print(f"  {workload}: warm-up {step}/{steps}, loss {result.loss:.3f}, {rest:.0f} s to go", flush=True)
    checkpoint = part / "checkpoint"
    checkpoint.mkdir()
    learner.save(checkpoint)
    learner.close()
    (checkpoint / "policy").rename(part / "policy")
    shutil.rmtree(checkpoint)
    for name in SHARED_FILES[1:]:
        shutil.copy(SHAPE / name, part / "policy" / name)
    config = json.loads((part / "policy" / "config.json").read_text())
    (part / "policy" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_POSITIONS}))


def demonstrations(problems: list[Problem], answers: list[str]) -> "Batch":
    """Return problems with one answer each, as trajectories that train only the answer."""
    import numpy as np

    from rl_core import Batch, Trajectory
    from rl_rollout.prompts import PromptTokenizer

    tokenizer = PromptTokenizer.load(SHAPE)
    end = int(json.loads((SHAPE / "config.json").read_text())["eos_token_id"])
    questions = tokenizer.encode([problem.question for problem in problems], add_special_tokens=False)
    responses = tokenizer.encode(answers, add_special_tokens=False)
    trajectories = []
    for index, (question, response) in enumerate(zip(questions, responses, strict=True)):
        tokens = np.asarray([*question, *response, end], dtype=np.int32)
        trajectories.append(
            Trajectory(
                prompt_uid=str(index),
                session_index=0,
                input_ids=tokens,
                loss_mask=np.arange(len(tokens)) >= len(question),
                rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
                policy_versions=np.full(len(tokens), -1, dtype=np.int32),
            )
        )
    return Batch.from_trajectories(trajectories)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    if is_prepared() and "--force" not in sys.argv[1:]:
        print(f"{PREPARED} is up to date", flush=True)
    else:
        prepare()
