"""Check that the learners support the models and the layout; unsupported models can only be evaluated."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rl_core.errors import DataError, SettingsError
from rl_distill import LoraOptions, check_layout, check_learner, check_ranks, parse_policy_config, read_policy_config
from rl_trainer_parts.checks.lora import lora_files
from rl_trainer_parts.checks.model_folder import check_policy_folder
from rl_trainer_parts.learning.start_learners import needs_critic
from rl_trainer_parts.settings.schema import Settings


def trainable_problems(settings: Settings) -> Iterator[str]:
    """Problems of the policy and of a separate critic that the folder checks do not cover."""
    yield from _problems(settings, settings.policy.path, "policy.path", has_adapter=True)
    if needs_critic(settings) and settings.critic.path not in (None, settings.policy.path):
        yield from _problems(settings, settings.critic.path, "critic.path")


def _problems(settings: Settings, folder: Path, setting: str, *, has_adapter: bool = False) -> Iterator[str]:
    if any(check_policy_folder(folder, setting=setting, needs_tokenizer=False)):
        return
    try:
        config = parse_policy_config(read_policy_config(folder))
    except (SettingsError, DataError) as error:
        yield f"{setting}: {error}"
        return
    if has_adapter:
        yield from lora_files(settings, config)
    try:
        check_ranks(settings.parallel)
    except SettingsError:  # reported by the check of values
        return
    lora = settings.lora if has_adapter else LoraOptions()
    checks = (
        ("parallel", partial(check_layout, settings.parallel, config)),
        ("optimizer", partial(check_learner, settings.optimizer, settings.parallel, config, lora=lora)),
    )
    for table, check in checks:
        try:
            check()
        except SettingsError as error:
            yield from (f"{table}.{line} (This concerns {setting}, {folder}.)" for line in str(error).splitlines())
