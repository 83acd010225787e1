"""Workloads: their settings, the prompts of their steps in order, and the same as a job for the peer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.data import Prompt
from rl_rollout.prompts import PromptSource
from rl_trainer_parts.rollouts.inputs import read_inputs
from rl_trainer_parts.settings.schema import Settings
from rl_trainer_parts.settings.sources import load_settings

RULES = Path(__file__).parent / "_rules.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One comparison.

    Attributes:
        name: "short", "long_tail" or "long_prompt".
        settings: Our trainer's settings file, from which the peer's job is derived.
        preparation: Script that creates the files named in the settings if they are out of date; None without one.
        rule: The reward, a function in _rules.py.
        steps: Steps of a run, including warm-up.
        target: Minimum ratio of samples per second.
        trl_micro_batch: TRL's per_device_train_batch_size, the fastest one found.
        trl_continuous_batching: TRL's use_transformers_continuous_batching, the faster choice.
    """

    name: str
    settings: Path
    preparation: Path | None
    rule: str
    steps: int
    target: float
    trl_micro_batch: int
    trl_continuous_batching: bool

    @property
    def samples_per_step(self) -> int:
        """Responses per step."""
        rollout = load_settings(self.settings, [], {}).rollout
        return rollout.prompts_per_step * rollout.group_size

    def arguments(self, *, seed: int, steps: int) -> list[str]:
        """Return our trainer's arguments: seed, steps, and no validation during the run."""
        return [
            f"--run.seed={seed}",
            f"--trainer.steps={steps}",
            "--trainer.validate_every=0",
            "--trainer.validate_first=false",
            "--trainer.checkpoint_every=0",
            "--metrics.console=off",
        ]

    def job(self, *, seed: int, steps: int) -> dict[str, Any]:
        """Return the peer's job: our settings, and the prompts that our trainer draws with this seed, in its order."""
        settings = load_settings(self.settings, self.arguments(seed=seed, steps=steps), {})
        source = PromptSource(read_inputs(settings).train, seed=seed)
        prompts = source.next(steps * settings.rollout.prompts_per_step)
        return {
            "seed": seed,
            "steps": steps,
            "prompts": [prompt_row(prompt) for prompt in prompts],
            "rule": [str(RULES), self.rule],
            "micro_batch": self.trl_micro_batch,
            "continuous_batching": self.trl_continuous_batching,
            **shared_settings(settings),
        }


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as text and as its expected tokens."""
    return {"prompt": prompt_text(prompt), "input_ids": prompt.input_ids.tolist(), "ground_truth": prompt.ground_truth}


def prompt_text(prompt: Prompt) -> str:
    """The text behind the tokens; both workloads write a question and end it with "="."""
    if not prompt.messages:
        return str(prompt.columns["prompt"])
    return f"{prompt.messages[-1]['content']}="


def shared_settings(settings: Settings) -> dict[str, Any]:
    """Return the hyperparameters of both sides."""
    rollout, algorithm, learner = settings.rollout, settings.algorithm, settings.optimizer
    return {
        "policy": str(settings.policy.path),
        "prompts_per_step": rollout.prompts_per_step,
        "group_size": rollout.group_size,
        "max_response_tokens": rollout.max_response_tokens,
        "temperature": rollout.temperature,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "learning_rate": learner.learning_rate,
        "warmup_steps": learner.warmup_steps,
        "betas": list(learner.betas),
        "eps": learner.eps,
        "weight_decay": learner.weight_decay,
        "clip_grad": learner.clip_grad,
        "num_threads": learner.num_threads,
    }


def named(names: Sequence[str], workloads: Sequence[Workload]) -> list[Workload]:
    """Return the workloads with these names.

    Raises:
        SystemExit: A name is unknown.
    """
    known = {workload.name: workload for workload in workloads}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"error: --workload takes {', '.join(known)}; found {', '.join(unknown)}.")
    return [known[name] for name in names]
