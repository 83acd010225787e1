"""What is run: each workload's settings, the prompts of its steps in order, and the same as a job for the peer."""

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
        settings: Our trainer's file, which the peer's job is made from too.
        preparation: Script that makes what the settings name, keeping what is up to date; None where all is there.
        rule: The reward, as a function of _rules.py.
        steps: Of a run, the warm-up steps included.
        target: Smallest ratio of samples a second that is wanted.
        trl_micro_batch: TRL's per_device_train_batch_size, the fastest that was found.
        trl_continuous_batching: TRL's use_transformers_continuous_batching, whichever was found faster.
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
        """Responses of a step."""
        rollout = load_settings(self.settings, [], {}).rollout
        return rollout.prompts_per_step * rollout.group_size

    def arguments(self, *, seed: int, steps: int) -> list[str]:
        """What our trainer's command line gets: nothing but seed, steps, and no validation in between."""
        return [
            f"--run.seed={seed}",
            f"--trainer.steps={steps}",
            "--trainer.validate_every=0",
            "--trainer.validate_first=false",
            "--trainer.checkpoint_every=0",
            "--metrics.console=off",
        ]

    def job(self, *, seed: int, steps: int) -> dict[str, Any]:
        """What the peer runs: our settings, and the prompts that our trainer draws with this seed, in its order."""
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
    """A prompt as text and as the tokens that it must give."""
    return {"prompt": prompt_text(prompt), "input_ids": prompt.input_ids.tolist(), "ground_truth": prompt.ground_truth}


def prompt_text(prompt: Prompt) -> str:
    """The text behind the tokens; both workloads write a question and end it with "="."""
    if not prompt.messages:
        return str(prompt.columns["prompt"])
    return f"{prompt.messages[-1]['content']}="


def shared_settings(settings: Settings) -> dict[str, Any]:
    """The numbers that both sides train with."""
    rollout, algorithm, learner = settings.rollout, settings.algorithm, settings.learner
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
    """The workloads with these names.

    Raises:
        SystemExit: A name is unknown.
    """
    known = {workload.name: workload for workload in workloads}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"error: --workload takes {', '.join(known)}; found {', '.join(unknown)}.")
    return [known[name] for name in names]
