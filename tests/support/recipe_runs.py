"""Recipes of the cookbook as processes of their own, with a served policy, and the numbers that they must reach."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipe_world import MODEL, OTHER_MODELS

Metrics = dict[str, list[float]]
START_S = 300.0
PACKAGE = "tinker_cookbook.recipes"
CHATS = f"{PACKAGE}.chat_sl.chat_datasets:NoRobotsBuilder"
PROBLEMS = f"{PACKAGE}.math_rl.math_env:Gsm8kDatasetBuilder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that a run must reach.

    Attributes:
        name: What it is, for the table.
        value: Computes it from the run's metrics by name.
        is_reached: Says whether it is what was wanted.
        wanted: What was wanted, for the table.
    """

    name: str
    value: Callable[[Metrics], float]
    is_reached: Callable[[float], bool]
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe, with the options that make it small.

    Attributes:
        name: Name of this run.
        module: Module below the cookbook's recipes.
        options: Its own options.
        figure: The number that it must reach; none only has to finish.
        limit_s: Maximum duration in seconds.
        has_log: It takes a model and a folder for its metrics, as all but scripts of several stages do.
    """

    name: str
    module: str
    options: str = ""
    figure: Figure | None = None
    limit_s: float = 300.0
    has_log: bool = True


def fall(metric: str) -> Figure:
    """Return how much lower a metric is at the end."""
    return Figure(
        name=f"fall of {metric}",
        value=lambda found: -rise_of(found[metric]),
        is_reached=lambda it: it > 0,
        wanted="> 0",
    )


def rise(metric: str, least: float = 0.0) -> Figure:
    """Return how much higher a metric is at the end."""
    return Figure(
        name=f"rise of {metric}",
        value=lambda found: rise_of(found[metric]),
        is_reached=lambda it: it > least if least == 0 else it >= least,
        wanted=f"≥ {least}" if least else "> 0",
    )


def lowest(metric: str, most: float) -> Figure:
    """Return the lowest value of a metric as a share of the first."""
    return Figure(
        name=f"lowest {metric}, of the first",
        value=lambda found: min(found[metric]) / found[metric][0],
        is_reached=lambda it: it <= most,
        wanted=f"≤ {most:g}",
    )


def rise_of(values: list[float]) -> float:
    """Return the mean of the last fifth of values, less that of the first tenth: policies learn in a few steps."""
    first, last = max(1, len(values) // 10), max(1, len(values) // 5)
    return sum(values[-last:]) / last - sum(values[:first]) / first


def highest(metric: str, most: float) -> Figure:
    """Return the highest absolute value of a metric at any step."""
    return Figure(
        name=f"highest {metric}",
        value=lambda found: max(abs(value) for value in found[metric]),
        is_reached=lambda it: it <= most,
        wanted=f"≤ {most:g}",
    )


REWARD = 0.3
SMALL = "lora_rank=8"
PLAY = "renderer_name=qwen3 max_tokens=8 max_steps=2 eval_every=0"
MATH = "loss_fn=importance_sampling group_size=8 eval_every=0 save_every=0"
SDFT = "groups_per_batch=16 max_tokens=12 max_steps=10 learning_rate=1e-3 eval_every=0 save_every=0"
RL_LOOP = "batch_size=16 group_size=8 learning_rate=4e-3 max_tokens=8 max_steps=30 save_every=0"
RECIPES = (
    Recipe(
        name="sl_loop",
        module="sl_loop",
        options=f"{SMALL} batch_size=8 learning_rate=1e-2 save_every=10",
        figure=fall("train_mean_nll"),
    ),
    *(
        Recipe(
            name=f"rl_loop, {loss}",
            module="rl_loop",
            options=f"{SMALL} {RL_LOOP} loss_fn={loss}",
            figure=rise("reward/total", REWARD),
        )
        for loss in ("importance_sampling", "cispo", "gspo")
    ),
    Recipe(
        name="sl_basic",
        module="sl_basic",
        options=f"{SMALL} learning_rate=1e-2 dataset_builder={CHATS} dataset_builder.common_config.batch_size=8 "
        f"dataset_builder.common_config.model_name_for_tokenizer={MODEL} "
        "dataset_builder.common_config.renderer_name=qwen3 dataset_builder.common_config.max_length=512",
        figure=fall("test/nll"),
    ),
    Recipe(
        name="rl_basic",
        module="rl_basic",
        options=f"{SMALL} learning_rate=4e-3 max_tokens=8 max_steps=30 loss_fn=importance_sampling save_every=0 "
        f"dataset_builder={PROBLEMS} dataset_builder.batch_size=16 dataset_builder.group_size=8 "
        f"dataset_builder.model_name_for_tokenizer={MODEL} dataset_builder.renderer_name=qwen3",
        figure=rise("env/all/reward/total", REWARD),
    ),
    Recipe(
        name="math_rl, gsm8k",
        module="math_rl.train",
        options=f"{SMALL} {MATH} env=gsm8k learning_rate=4e-3 groups_per_batch=16 max_tokens=8 max_steps=30",
        figure=rise("env/all/reward/total", REWARD),
    ),
    Recipe(
        name="chat_sl",
        module="chat_sl.train",
        options=f"{SMALL} dataset=conversations.jsonl batch_size=8 learning_rate=1e-2",
        figure=fall("train_mean_nll"),
    ),
    Recipe(
        name="preference, DPO",
        module="preference.dpo.train",
        options="batch_size=8 learning_rate=1e-3 max_steps=20",
        figure=rise("margin"),
    ),
    Recipe(
        name="prompt_distillation",
        module="prompt_distillation.train",
        options=f"{SMALL} file_path=labelled.jsonl batch_size=8 learning_rate=1e-2 num_epochs=1",
        figure=fall("train_mean_nll"),
    ),
    Recipe(
        name="distillation",
        module="distillation.on_policy_distillation",
        options=f"{SMALL} teacher_model={MODEL} teacher_checkpoint={{teacher}} groups_per_batch=16 max_tokens=12 "
        "learning_rate=4e-3 max_steps=20 eval_every=0 save_every=0",
        figure=fall("teacher_kl"),
    ),
    Recipe(
        name="distillation, off policy",
        module="distillation.off_policy_reasoning",
        options=f"{SMALL} renderer_name=qwen3 batch_size=8 learning_rate=1e-2 max_prompts=200 buffer_size=64 "
        "max_length=512 eval_every=0 save_every=0",
        figure=fall("train_mean_nll"),
    ),
    Recipe(
        name="distillation, two teachers",
        module="distillation.on_policy_multi_teacher",
        options=f"{SMALL} deepmath_teacher_model={MODEL} deepmath_teacher_checkpoint={{teacher}} "
        f"tulu3_teacher_model={MODEL} tulu3_teacher_checkpoint={{teacher}} deepmath_groups_per_batch=8 "
        "tulu3_groups_per_batch=8 max_tokens=12 learning_rate=4e-3 max_steps=20 eval_every=0 save_every=0",
        figure=fall("teacher_kl"),
    ),
    Recipe(
        name="sdft",
        module="sdft.train",
        options=f"{SMALL} {SDFT}",
        figure=lowest("grad_norm", 0.5),
    ),
    Recipe(
        name="sdft, reverse",
        module="sdft.train",
        options=f"{SMALL} {SDFT} reverse=true",
        figure=lowest("sdft/reverse_kl_mean", 0.5),
    ),
    Recipe(
        name="sdft, sampled",
        module="sdft.train",
        options=f"{SMALL} {SDFT} topk=0",
    ),
    Recipe(
        name="forecasting",
        module="forecasting.train",
        options=f"{SMALL} data_path=forecasts.csv loss_fn=importance_sampling groups_per_batch=8 group_size=4 "
        "max_tokens=8 max_steps=8 learning_rate=1e-3 save_every=0",
        figure=highest("optim/kl_sample_train_v1", 1e-4),
    ),
    Recipe(
        name="rl_numerics_check",
        module="rl_numerics_check.train",
        options=f"{SMALL} groups_per_batch=4 group_size=4 max_tokens=16 max_steps=10 learning_rate=1e-3 save_every=0 "
        "task.page_chars=100 task.num_pages_min=1 task.num_pages_max=2",
        figure=highest("optim/kl_sample_train_v1", 1e-4),
    ),
    Recipe(
        name="preference, shorter answers",
        module="preference.shorter.train",
        options=f"{PLAY} batch_size=4 group_size=4 learning_rate=1e-4",
        figure=highest("optim/kl_sample_train_v1", 1e-4),
    ),
    Recipe(
        name="preference, RLHF",
        module="preference.rlhf.rlhf_pipeline",
        options=f"base_model={MODEL} short_name=tiny {SMALL} batch_size=4 max_steps=2 rl_max_tokens=8 eval_every=0",
        has_log=False,
    ),
    Recipe(
        name="multiplayer_rl, guess_number",
        module="multiplayer_rl.guess_number.train",
        options=f"{PLAY} batch_size=2 group_size=2 learning_rate=1e-4",
        figure=highest("optim/kl_sample_train_v1", 1e-4),
    ),
    Recipe(
        name="multiplayer_rl, twenty_questions",
        module="multiplayer_rl.twenty_questions.train",
        options=f"{PLAY} batch_size=2 group_size=2 learning_rate=1e-4",
        figure=highest("optim/kl_sample_train_v1", 1e-4),
    ),
    Recipe(name="true_thinking_score", module="true_thinking_score.run_small_experiment", has_log=False),
    Recipe(name="rubric, data", module="rubric.generate_data", has_log=False),
    Recipe(
        name="rubric",
        module="rubric.train",
        options=f"{PLAY} {SMALL} loss_fn=importance_sampling grader_llm_name={MODEL} grader_renderer_name=qwen3 "
        "groups_per_batch=2 train_group_size=2 learning_rate=1e-4",
        figure=highest("optim/kl_sample_train_v1", 1e-4),
    ),
)
ARITHMETIC = Recipe(
    name="math_rl, arithmetic",
    module="math_rl.train",
    options=f"{SMALL} {MATH} learning_rate=1e-3 groups_per_batch=16 max_tokens=12 max_steps=30",
    figure=rise("env/all/reward/total", REWARD),
)
"""For a policy that was taught sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished recipe.

    Attributes:
        seconds: How long it took.
        metrics: What it logged, by name.
        output: What it printed.
        sampler: Path of the last weights that it saved to sample from; empty without any.
    """

    seconds: float
    metrics: Metrics
    output: str
    sampler: str


@dataclass(frozen=True, slots=True)
class Site:
    """A served policy and the directory of its recipes."""

    folder: Path
    address: str
    python: str

    def run(self, recipe: Recipe, *, log: Path, **values: str) -> Run:
        """Run a recipe until it ends.

        Args:
            recipe: The recipe.
            log: Folder for its metrics.
            **values: Values for its options.

        Raises:
            RuntimeError: It failed; the message has the end of its output.
        """
        command = [self.python, "-m", f"{PACKAGE}.{recipe.module}", *recipe.options.format(**values).split()]
        if recipe.has_log:
            command += [f"model_name={MODEL}", f"log_path={log}"]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=recipe.limit_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{recipe.name} ended with {done.returncode}:\n{done.stdout[-6000:]}")
        saved = rows_of(log / "checkpoints.jsonl")
        return Run(
            seconds=time.monotonic() - started,
            metrics=read_metrics(log / "metrics.jsonl"),
            output=done.stdout,
            sampler=saved[-1].get("sampler_path", "") if saved else "",
        )

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a program that uses the service."""
        return {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP")},
            "TINKER_BASE_URL": self.address,
            "TINKER_API_KEY": (self.folder / "service" / "key").read_text().strip(),
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hub"),
            "TINKER_COOKBOOK_RUNS_DIR": str(self.folder / "runs"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


@contextmanager
def serving(folder: Path, python: str, **options: str) -> Iterator[Site]:
    """Serve the policy of a directory, as a process, while the context is open."""
    names = json.dumps([MODEL, *OTHER_MODELS])
    words = [f"--policy={folder / MODEL}", f"--policy.names={names}", f"--server.folder={folder / 'service'}"]
    words += ["--learner.num_threads=1", *(f"--{name}={value}" for name, value in options.items())]
    output = folder / "service.log"
    with output.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "rl_service.main", "serve", *words], stdout=file, stderr=file)
    try:
        yield Site(folder, address_of(process, output), python)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def address_of(process: "subprocess.Popen[bytes]", output: Path) -> str:
    """Wait until the service says where it listens."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        found = [line for line in output.read_text().splitlines() if line.startswith("Serving ")]
        if found:
            return found[0].rpartition(" at ")[2].rstrip(".")
        time.sleep(0.1)
    raise RuntimeError(f"the service did not start:\n{output.read_text()[-4000:]}")


def read_metrics(file: Path) -> Metrics:
    """Return the numbers that a recipe logged, by name, in order."""
    found: Metrics = {}
    for row in rows_of(file):
        for name, value in row.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return found


def rows_of(file: Path) -> list[dict[str, object]]:
    """Return the lines of a file of JSON; none if it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
