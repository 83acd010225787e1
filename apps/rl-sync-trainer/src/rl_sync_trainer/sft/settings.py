"""Settings of `sft`: those of the trainers that apply without rollouts, and `[sft]`; `sft --help` prints them."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field

from rl_core.errors import SettingsError
from rl_trainer_parts.settings.schema import Count, Settings, TrainerSettings

VALIDATION_LOSS = "sft/validation_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Demonstrations and batches of supervised training, `rl-sync-trainer sft`.

    Attributes:
        columns: Column with conversations, as messages, whose assistant's turns are trained; or the columns of prompts,
            as messages or text (`prompts.plain_prompts`), and of the answers that are trained. A column `tools`, if
            there is one, has lists of schemas for the chat template, or their JSON.
        batch_size: Demonstrations per optimizer step; the last step of an epoch trains on the rest.
        epochs: Passes over the demonstrations, in place of `trainer.steps`, whose default then has no effect.
        shuffle: Use another order in each epoch, from `run.seed`; false keeps that of the file.
    """

    columns: tuple[str] | tuple[str, str] = ("messages",)
    batch_size: Count = 64
    epochs: Count | None = None
    shuffle: bool = True


class SftSettings(Settings):
    """All settings of supervised training."""

    command: ClassVar[str] = "sft"
    also_changeable_on_resume: ClassVar[tuple[str, ...]] = ("sft.epochs",)
    left_out: ClassVar[tuple[str, ...]] = (
        *("reward.", "rollout.", "algorithm.", "vllm.", "critic.", "correction.", "distillation.", "dynamic_sampling."),
        *("rollout_cache.", "replicas.", "weights.", "lora.serving", "prompts.test", "prompts.requires_ground_truth"),
        *("prompts.max_images", "prompts.image_folders", "prompts.image_urls", "prompts.validation_samples"),
        *("prompts.validation_temperature", "trainer.minibatches", "trainer.epochs", "trainer.offload_learner"),
        *("trainer.canary_prompts", "trainer.proof_tolerance", "metrics.strict", "metrics.log_val_generations"),
        *("metrics.log_rollouts", "metrics.log_rollout_tokens", "metrics.probes", "metrics.probe_tokens"),
        *("metrics.replay_rows", "metrics.details_every", "metrics.trace_memory", "metrics.peak_tflops"),
        *("optimizer.image_folder", "optimizer.trains_vision"),
    )

    sft: SftOptions = Field(default_factory=SftOptions)

    def resolved(self, num_sequences: int) -> "SftSettings":
        """Settings with the steps of `sft.epochs`, and with the validation loss as the target's metric.

        Raises:
            SettingsError: `trainer.steps` asks for other steps, or the target for another metric.
        """
        trainer, epochs, target = self.trainer, self.sft.epochs, self.trainer.target
        if epochs is not None:
            steps = epochs * -(-num_sequences // self.sft.batch_size)
            if trainer.steps not in (steps, TrainerSettings().steps):
                raise SettingsError(f"sft.epochs = {epochs} is {steps} steps; found trainer.steps = {trainer.steps}.")
            trainer = replace(trainer, steps=steps)
        if target.metric not in (None, VALIDATION_LOSS):
            raise SettingsError(f"trainer.target.metric must be {VALIDATION_LOSS!r} or none; found {target.metric!r}.")
        if self.prompts.validation is not None:
            trainer = replace(trainer, target=replace(target, metric=VALIDATION_LOSS, lower_is_better=True))
        return self.model_copy(update={"trainer": trainer})
