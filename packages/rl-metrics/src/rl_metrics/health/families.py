"""Families of runs by learning signal, because rules for policy gradients do not apply to distillation."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

Family = Literal["policy_gradient", "distillation", "mixed"]
"""Rewards by a policy gradient, teachers, or both together."""

FAMILIES: tuple[Family, ...] = get_args(Family)
REWARDED: tuple[Family, ...] = ("policy_gradient", "mixed")
"""Rewards are learnt from, alone or beside teachers."""

GRADIENT_ALONE: tuple[Family, ...] = ("policy_gradient",)
"""Where loss, gradients, entropy and lengths are those of a policy gradient alone."""

FAMILY_TEXTS: dict[Family, str] = {
    "policy_gradient": "a policy gradient",
    "distillation": "distillation",
    "mixed": "distillation beside rewards",
}

OF_TEACHERS = "actor/distillation/"
"""What the names of metrics begin with that only a run with teachers, or their texts, has."""


def family_of(metrics: Collection[str], settings: Mapping[str, Any]) -> Family:
    """What a recorded run learns from.

    Args:
        metrics: Names of its metrics.
        settings: Of the run, as tables; without them a run with teachers is taken to learn from these alone.
    """
    if not any(name.startswith(OF_TEACHERS) for name in metrics):
        return "policy_gradient"
    distillation = settings.get("distillation")
    is_mixed = isinstance(distillation, Mapping) and distillation.get("use_task_rewards") is True
    return "mixed" if is_mixed else "distillation"
