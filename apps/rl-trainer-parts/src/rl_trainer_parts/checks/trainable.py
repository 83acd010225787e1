"""Check that the learners support the models, the layout and `[lora]`; unsupported models can only be evaluated."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rl_core.errors import DataError, SettingsError
from rl_distill import LoraOptions, PolicyConfig, adapted_modules, check_layout, check_learner, check_ranks
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.learning.start_learners import needs_critic
from rl_trainer_parts.settings.fields import problems_of
from rl_trainer_parts.settings.schema import Settings

FROM_LORA = ("max_lora_rank", "lora_target_modules")
"""Engine options that trainers derive from `[lora]`."""


def lora_problems(settings: Settings) -> Iterator[str]:
    """Problems of values and combinations that do not depend on files."""
    lora = settings.lora
    for name in FROM_LORA:
        if value := getattr(settings.vllm, name):
            yield f"vllm.{name} is derived from [lora] in training; found {value!r}. Leave it out."
    if not lora.rank:
        plain = LoraOptions()  # the run would silently train all weights
        unused = [f"lora.{one.name}" for one in fields(lora) if getattr(lora, one.name) != getattr(plain, one.name)]
        if unused:
            yield (
                f"lora.rank = 0 trains all weights; found adapter settings: {', '.join(unused)}. Set lora.rank, or "
                "leave them out."
            )
    elif settings.policy.backend != "megatron":
        yield (
            f'lora.rank = {lora.rank} needs policy.backend = "megatron"; found {settings.policy.backend!r}, which '
            "trains all weights."
        )


def trainable_problems(settings: Settings) -> Iterator[str]:
    """Problems of the policy and of a separate critic that the folder checks do not cover."""
    yield from _problems(settings, settings.policy.path, "policy.path", lora=settings.lora)
    if needs_critic(settings) and settings.critic.path not in (None, settings.policy.path):
        yield from _problems(settings, settings.critic.path, "critic.path", lora=LoraOptions())


def _problems(settings: Settings, folder: Path, setting: str, *, lora: LoraOptions) -> Iterator[str]:
    if any(check_policy_folder(folder, setting=setting, needs_tokenizer=False)):
        return
    try:
        config = model_config(folder)
    except (SettingsError, DataError) as error:
        yield f"{setting}: {error}"
        return
    if lora.rank:
        yield from _adapter(lora, config)
    if any(problems_of("", check_ranks, settings.parallel)):  # reported by the check of values
        return
    layout = problems_of("parallel.", check_layout, settings.parallel, config)
    options = problems_of("optimizer.", check_learner, settings.optimizer, settings.parallel, config, lora=lora)
    yield from (f"{line} (This concerns {setting}, {folder}.)" for line in (*layout, *options))


def _adapter(lora: LoraOptions, config: PolicyConfig) -> Iterator[str]:
    """Problems of target patterns that do not match the policy, and of an unusable initial adapter."""
    try:
        modules = adapted_modules(config, lora)
    except SettingsError as error:
        yield from (f"lora.{line}" for line in str(error).splitlines())
        return
    if lora.path is None:
        return
    from rl_distill.checkpoints.merged_folder import check_adapter  # imports torch

    try:
        check_adapter(lora.path, lora, modules)
    except DataError as error:
        yield f"lora.path: {error} Use a folder that peft's save_pretrained wrote, or a checkpoint's adapter/."
