"""Make the long_tail workload: prompts, and a policy of the arithmetic example's shape that is taught to count down.

Everything goes to `prepared/` beside this file, and is kept there until this file, the shape or the tokenizer of
the policy, or a version of what it is made with changes.
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
"""Three digits, and a comma or the end of the sequence."""

WARM_UP_STEPS = 160
DEMONSTRATIONS_PER_STEP = 256
SHORTENED_SHARE = 0.35
"""Share of demonstrations that end one number early. GRPO unlearns this, so that there is a curve to compare."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Count down to the hundred.

    Attributes:
        start: 101 to 947, its last two digits below 48: how many more numbers there are.
    """

    start: int

    @property
    def question(self) -> str:
        """Such as "503="."""
        return f"{self.start}="

    @property
    def answer(self) -> str:
        """Such as "503,502,501,500"."""
        return ",".join(map(str, range(self.start, self.start // 100 * 100 - 1, -1)))

    @property
    def shortened(self) -> str:
        """The answer without its last number."""
        return self.answer.rpartition(",")[0]


def draw_problems(num_problems: int, *, seed: int) -> list[Problem]:
    """Problems whose counts are log-normal: median 5 numbers (20 tokens), largest 48 (192 tokens)."""
    draws = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < num_problems:
        count = round(draws.lognormvariate(math.log(MEDIAN_COUNT), LOG_DEVIATION))
        if 2 <= count <= LARGEST_COUNT:
            problems.append(Problem(draws.randint(1, 9) * 100 + count - 1))
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
    """True when the folder is there, whole, and up to date."""
    try:
        made: dict[str, str] = json.loads((PREPARED / "fingerprint.json").read_text())
    except (OSError, ValueError):
        return False
    return made.get("fingerprint") == fingerprint()


def prepare() -> None:
    """Make the folder aside and rename it, so that an interrupted run leaves nothing half made."""
    started = time.perf_counter()
    print(f"long_tail: making prompts and policy in {PREPARED} (once; about 2 minutes on two cores)", flush=True)
    part = PREPARED.with_name(".prepared.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    problems = draw_problems(NUM_PROBLEMS, seed=0)
    rows = [{"data_source": "counting", "prompt": p.question, "answer": p.answer} for p in problems]
    (part / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warm_up(part, problems)
    (part / "fingerprint.json").write_text(json.dumps({"fingerprint": fingerprint()}))
    shutil.rmtree(PREPARED, ignore_errors=True)
    part.rename(PREPARED)
    print(f"long_tail: prepared in {time.perf_counter() - started:.0f} s", flush=True)


def warm_up(part: Path, problems: list[Problem]) -> None:
    """Train on demonstrations by supervised learning, and write the policy's folder."""
    import numpy as np

    from rl_core import Batch
    from rl_distill.learner import LearnerOptions
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import with_loss_weights
    from rl_distill.supervised import supervised_objective

    options = LearnerOptions(
        learning_rate=3e-3,
        warmup_steps=20,
        decay_steps=WARM_UP_STEPS,
        betas=(0.9, 0.99),
        clip_grad=1.0,
        micro_batch_tokens=8192,
        num_threads=2,
    )
    learner = MegatronLearner(json.loads((SHAPE / "config.json").read_text()), options)
    whole = demonstrations(problems, [problem.answer for problem in problems])
    shortened = demonstrations(problems, [problem.shortened for problem in problems])
    draws = np.random.default_rng(0)
    started = time.perf_counter()
    for step in range(1, WARM_UP_STEPS + 1):
        rows = draws.choice(len(problems), size=DEMONSTRATIONS_PER_STEP, replace=False)
        is_short = draws.random(len(rows)) < SHORTENED_SHARE
        batch = Batch.concat([whole.select(rows[~is_short]), shortened.select(rows[is_short])])
        result = learner.train_step(with_loss_weights(batch, aggregation="token-mean"), supervised_objective)
        if step % 20 == 0:
            took = time.perf_counter() - started
            rest = took / step * (WARM_UP_STEPS - step)
            print(f"  warm-up {step}/{WARM_UP_STEPS}, loss {result.loss:.3f}, {rest:.0f} s to go", flush=True)
    checkpoint = part / "checkpoint"
    checkpoint.mkdir()
    learner.save(checkpoint)
    learner.close()
    (checkpoint / "policy").rename(part / "policy")
    shutil.rmtree(checkpoint)
    for name in SHARED_FILES[1:]:
        shutil.copy(SHAPE / name, part / "policy" / name)


def demonstrations(problems: list[Problem], answers: list[str]) -> "Batch":
    """All problems with an answer each, as trajectories whose answer is trained."""
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
        print(f"long_tail: {PREPARED} is up to date", flush=True)
    else:
        prepare()
