"""Families of runs by learning signal, because rules for policy gradients do not apply to distillation."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

Family = Literal["policy_gradient", "distillation", "mixed"]
"""Learning from rewards by a policy gradient, from teachers, or from both."""

FAMILIES: tuple[Family, ...] = get_args(Family)
REWARDED: tuple[Family, ...] = ("policy_gradient", "mixed")
"""Families that learn from rewards, alone or with teachers."""

GRADIENT_ALONE: tuple[Family, ...] = ("policy_gradient",)
"""Families whose loss, gradients, entropy and lengths come only from a policy gradient."""

FAMILY_TEXTS: dict[Family, str] = {
    "policy_gradient": "a policy gradient",
    "distillation": "distillation",
    "mixed": "distillation with rewards",
}

OF_TEACHERS = "actor/distillation/"
"""Prefix of metrics that only runs with teachers have."""


def family_of(metrics: Collection[str], settings: Mapping[str, Any]) -> Family:
    """Return the family of a recorded run.

    Args:
        metrics: Names of its metrics.
        settings: Settings of the run, as tables; without them, a run with teachers counts as distillation alone.
    """
    if not any(name.startswith(OF_TEACHERS) for name in metrics):
        return "policy_gradient"
    distillation = settings.get("distillation")
    is_mixed = isinstance(distillation, Mapping) and distillation.get("use_task_rewards") is True
    return "mixed" if is_mixed else "distillation"
