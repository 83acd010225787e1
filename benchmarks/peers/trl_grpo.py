"""One run of TRL's GRPOTrainer: `benchmarks/trl.py` starts it with a job and reads its result.

It runs in TRL's own environment, without this repository's packages.
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

trl: Any = import_module("trl")  # for a plain import, the type checker would find benchmarks/trl.py
Rule = Callable[..., float]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times each optimizer step, from before its batch is generated to after its update."""

    def __init__(self) -> None:
        """Start without times."""
        self.step_s: list[float] = []
        self.generate_s: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self.step_s.append(time.perf_counter() - self._started)

    def timing_generation(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its time recorded."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generate_s.append(time.perf_counter() - started)

        return timed


class Rewards:
    """The job's rule as a TRL reward function that records its inputs."""

    def __init__(self, rule: Rule, end_token_id: int) -> None:
        """Start without records.

        Args:
            rule: Returns the reward for (text, ground truth, is_ended=...).
            end_token_id: Token that ends a response.
        """
        self.__name__ = "rule"
        self.means: list[float] = []
        self.lengths: list[list[int]] = []
        self._rule = rule
        self._end_token_id = end_token_id

    def __call__(
        self, completions: Sequence[str], completion_ids: Sequence[list[int]], ground_truth: Sequence[str], **_: Any
    ) -> list[float]:
        """Return the rewards of one step's completions."""
        rewards = [
            self._rule(text, truth, is_ended=bool(ids) and ids[-1] == self._end_token_id)
            for text, ids, truth in zip(completions, completion_ids, ground_truth, strict=True)
        ]
        self.means.append(float(np.mean(rewards)))
        self.lengths.append([len(ids) for ids in completion_ids])
        return rewards


def load_rule(file: str, name: str) -> Rule:
    """Return a function of a Python file."""
    spec = importlib.util.spec_from_file_location("rules", file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rule: Rule = getattr(module, name)
    return rule


def config(job: Mapping[str, Any], folder: str) -> Any:
    """Return TRL's settings for the job: the fastest on CPUs that compute the same update."""
    samples = job["prompts_per_step"] * job["group_size"]
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        seed=job["seed"],
        shuffle_dataset=False,
        max_steps=job["steps"],
        num_generations=job["group_size"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=samples // job["micro_batch"],
        max_completion_length=job["max_response_tokens"],
        temperature=job["temperature"],
        top_p=1.0,
        top_k=0,
        use_transformers_continuous_batching=job["continuous_batching"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["clip_grad"],
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group",
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        num_iterations=1,
    )


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and return the measurements."""
    torch.set_num_threads(job["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["policy"], padding_side="left", trust_remote_code=False)
    texts = [row["prompt"] for row in job["prompts"]]
    if tokenizer(text=texts)["input_ids"] != [row["input_ids"] for row in job["prompts"]]:
        raise SystemExit("TRL's tokenizer returns other prompt tokens than ours, so the runs could not be compared.")
    model = AutoModelForCausalLM.from_pretrained(job["policy"], dtype=torch.float32, trust_remote_code=False)
    rewards, clock = Rewards(load_rule(*job["rule"]), tokenizer.eos_token_id), Clock()
    rows = [{"prompt": row["prompt"], "ground_truth": row["ground_truth"]} for row in job["prompts"]]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config(job, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer._generate = clock.timing_generation(trainer._generate)
        trainer.train()
    return {
        "step_s": clock.step_s,
        "generate_s": clock.generate_s,
        "rewards": rewards.means,
        "lengths": rewards.lengths,
        "versions": {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
