"""Checks of `[lora]` that run before models load."""

from collections.abc import Iterator
from dataclasses import fields

from rl_core.errors import DataError, SettingsError
from rl_distill import LoraOptions, PolicyConfig, adapted_modules
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
        yield from _without_rank(lora)
    elif settings.policy.backend != "megatron":
        yield (
            f'lora.rank = {lora.rank} needs policy.backend = "megatron"; found {settings.policy.backend!r}, which '
            "trains all weights."
        )


def _without_rank(lora: LoraOptions) -> Iterator[str]:
    """Problems of adapter settings in a run that would silently train all weights."""
    plain = LoraOptions()
    found = [field.name for field in fields(lora) if getattr(lora, field.name) != getattr(plain, field.name)]
    if found:
        yield (
            f"lora.rank = 0 trains all weights; found adapter settings: {', '.join(f'lora.{name}' for name in found)}. "
            "Set lora.rank, or leave them out."
        )


def lora_files(settings: Settings, config: PolicyConfig) -> Iterator[str]:
    """Problems of target patterns that do not match the policy, and of an unusable initial adapter.

    Args:
        settings: The run's settings.
        config: The policy's configuration.
    """
    lora = settings.lora
    if not lora.rank:
        return
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
