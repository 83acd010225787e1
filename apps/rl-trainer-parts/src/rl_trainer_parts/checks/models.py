"""Check that learners and engines support the models, the layout, `[lora]` and the agent loop, before models load."""

import asyncio
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from rl_core.errors import DataError, EngineError, SettingsError
from rl_distill import (
    LoraOptions,
    PolicyConfig,
    adapted_modules,
    check_layout,
    check_learner,
    check_ranks,
    count_parameters,
    read_policy_config,
    refuse_quantized,
)
from rl_rollout.engines import engine_class, takes_images
from rl_rollout.loops import resolve_loop
from rl_rollout.prompts import PromptTokenizer
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.learning.engine_choice import engine_name
from rl_trainer_parts.learning.mixtures import model_config
from rl_trainer_parts.learning.start_learners import needs_critic
from rl_trainer_parts.learning.teachers import teacher_engine_options
from rl_trainer_parts.rollouts.engines import engine_options
from rl_trainer_parts.rollouts.inputs import Inputs
from rl_trainer_parts.settings.fields import problems_of
from rl_trainer_parts.settings.schema import PromptSettings, Settings

FROM_LORA = ("max_lora_rank", "lora_target_modules")
"""Engine options that trainers derive from `[lora]`."""


def lora_problems(settings: Settings) -> Iterator[str]:
    """Problems of values and combinations that do not depend on files."""
    lora = settings.lora
    for name in FROM_LORA:
        if value := getattr(settings.vllm, name):
            yield f"vllm.{name} is derived from [lora] in training; found {value!r}. Leave it out."
    if settings.vllm.max_adapters != 1:
        yield f"vllm.max_adapters must be 1 in training, which has one adapter; found {settings.vllm.max_adapters}."
    if not lora.rank:
        plain = LoraOptions()  # the run would silently train all weights
        unused = [f"lora.{one.name}" for one in fields(lora) if getattr(lora, one.name) != getattr(plain, one.name)]
        if unused:
            yield (
                f"lora.rank = 0 trains all weights; found adapter settings: {', '.join(unused)}. Set lora.rank, or "
                "leave them out."
            )


def image_problems(settings: Settings) -> Iterator[str]:
    """Problems of settings of images: one that the run sets itself, and those of a policy that takes none."""
    if settings.vllm.image_folder is not None:
        yield "vllm.image_folder is the run's own folder of images. Leave it out."
    if not takes_images(settings.policy.path):
        plain = PromptSettings(train=settings.prompts.train)
        for name in ("max_images", "image_folders", "image_urls"):
            if getattr(settings.prompts, name) != getattr(plain, name):
                yield f"prompts.{name} is for images; the policy in {settings.policy.path} takes none. Leave it out."


def trainable_problems(settings: Settings) -> Iterator[str]:
    """Problems of the policy and of a separate critic that the folder checks do not cover."""
    if settings.optimizer.image_folder is not None:
        yield "optimizer.image_folder is the run's own folder of images. Leave it out."
    yield from _problems(settings, settings.policy.path, "policy.path", lora=settings.lora)
    if needs_critic(settings) and settings.critic.path not in (None, settings.policy.path):
        yield from _problems(settings, settings.critic.path, "critic.path", lora=LoraOptions())


def _problems(settings: Settings, folder: Path, setting: str, *, lora: LoraOptions) -> Iterator[str]:
    if any(check_policy_folder(folder, setting=setting, needs_tokenizer=False)):
        return
    try:
        refuse_quantized(read_policy_config(folder))
        config = model_config(folder, settings.policy.backend)
        count_parameters(config)  # transformers' class may refuse the tensors
    except (SettingsError, DataError) as error:
        yield f"{setting}: {error}"
        return
    if lora.rank:
        yield from _adapter(lora, config)
    if any(problems_of("", check_ranks, settings.parallel)):  # reported by the check of values
        return
    layout = problems_of("parallel.", check_layout, settings.parallel, config, lora=lora)
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


def check_images(settings: Settings, inputs: Inputs) -> None:
    """Check that everything that reads the prompts takes their images.

    Raises:
        SettingsError: Each line names a setting that does not work with images.
    """
    if not inputs.num_images:
        return
    found, loop, critic = [], settings.rollout.loop, settings.critic.path
    if loop == "verifiers":
        found.append(
            'rollout.loop = "verifiers" does not take prompts with images. Use "single_turn", "tools", "environment" '
            'or "agent".'
        )
    if settings.distillation.is_on:
        found.append("distillation does not take prompts with images: teachers read tokens. Leave [distillation] out.")
    if needs_critic(settings) and critic is not None and not takes_images(critic):
        found.append(f"critic.path = {critic} takes no images, but the prompts have some. Use a model that does.")
    if found:
        raise SettingsError("\n".join(found))


def check_engines(settings: Settings, *, has_images: bool = False) -> None:
    """Check that each engine supports its model and options, and images if the prompts have some.

    Skipped when the run joins a Ray cluster, whose machines may have other engines installed.

    Raises:
        SettingsError: Names the setting, what is supported and what was found.
        MissingExtraError: An engine's library is not installed.
    """
    if settings.cluster.ray_address is not None:
        return
    options = engine_options(settings)
    if has_images:
        options = replace(options, image_folder=settings.run_folder / "images")
    found, served = [], [("rollout.engine", engine_name(settings), settings.policy.path, options)]
    for name, teacher in settings.distillation.teachers.items():
        if teacher.engine == "vllm":
            setting, options = f"distillation.teachers.{name}.engine", teacher_engine_options(settings, name)
            served.append((setting, "vllm", teacher.model, options))
    for setting, engine, folder, options in served:
        check = getattr(engine_class(engine), "check", None)
        try:
            if check is not None:
                check(folder, options)
        except EngineError as error:
            found.append(f'{setting} = "{engine}": {error} Change that, or use another model or engine.')
    if found:
        raise SettingsError("\n".join(found))


def check_loop(settings: Settings, tokenizer: PromptTokenizer) -> list[str]:
    """Check that the agent loop works: start its tool servers once, and stop them.

    When the run joins a Ray cluster, the loop may run on another machine; then only its options are checked.

    Returns:
        Lines for the plan, such as the tools of each server.

    Raises:
        SettingsError: An option is wrong, or a server does not start.
        MissingExtraError: The loop needs a library that is not installed.
    """
    rollout = settings.rollout
    is_elsewhere = settings.cluster.ray_address is not None and settings.placements.get("roles.placement") == "ray"
    try:
        loop = resolve_loop(rollout.loop, rollout.loop_options)
        try:
            check = None if is_elsewhere else getattr(loop, "check", None)
            return [] if check is None else asyncio.run(check(tokenizer))
        finally:
            if hasattr(loop, "close"):
                loop.close()
    except SettingsError as error:
        raise SettingsError(f"rollout.loop = {rollout.loop!r} with rollout.loop_options: {error}") from error
