"""What a run learns from, and the options of a distillation's objective."""

from dataclasses import fields
from typing import Any

from rl_distill.objectives import DistillationObjectiveOptions
from rl_trainer_parts.settings.schema import Settings


def has_teachers(settings: Settings) -> bool:
    """True when the queue has a task for teachers."""
    return bool(settings.distillation.teachers)


def learns_from_rewards(settings: Settings) -> bool:
    """True when the policy learns from task rewards, with or without teachers."""
    return not settings.distillation.is_on or settings.distillation.use_task_rewards


def method_title(settings: Settings) -> str:
    """Name of the method, such as "GRPO"."""
    if learns_from_rewards(settings):
        return settings.algorithm.advantage.upper()
    return "Distillation" if has_teachers(settings) else "Imitation of texts"


def has_policy_gradient(settings: Settings) -> bool:
    """True when tokens have advantages, from tasks or from teachers used as a reward."""
    return learns_from_rewards(settings) or settings.distillation.used_as == "reward"


def objective_options(settings: Settings) -> DistillationObjectiveOptions:
    """The distillation objective.

    Raises:
        SettingsError: An option is impossible.
    """
    chosen = settings.distillation
    names = (option.name for option in fields(DistillationObjectiveOptions) if option.name != "teachers")
    options: Any = {name: getattr(chosen, name) for name in names}
    return DistillationObjectiveOptions(**options, teachers=tuple(chosen.teachers))
