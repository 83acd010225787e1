"""The objectives by name; other packages add theirs by entry point."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from rl_core.errors import SettingsError
from rl_core.registry import Registry, unknown_name
from rl_distill.objectives.advantages import AdvantageEstimator, dr_grpo, grpo
from rl_distill.objectives.aggregation import AGGREGATIONS, RowWeights
from rl_distill.objectives.kl import KL_ESTIMATORS, KLEstimator
from rl_distill.objectives.policy_loss import PolicyLoss, ppo_clip

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage", {"grpo": grpo, "dr_grpo": dr_grpo}, group="rl_distill.advantages"
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", {"ppo_clip": ppo_clip}, group="rl_distill.policy_losses")
KL: Registry[KLEstimator] = Registry("KL estimator", KL_ESTIMATORS)
AGGREGATION: Registry[RowWeights] = Registry("aggregation", AGGREGATIONS)


def function_with_options(registry: Registry[FunctionT], name: str, options: Mapping[str, Any]) -> FunctionT:
    """The function of this name with keyword options bound.

    Raises:
        SettingsError: There is no such function, or it has no such option.
    """
    function = registry.get(name)
    known, takes_any = _option_names(function)
    for option in options:
        if option not in known and not takes_any:
            raise SettingsError(unknown_name(f"option of {registry.kind} {name!r}:", option, known))
    return cast(FunctionT, partial(function, **options)) if options else function


def _option_names(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Keyword-only parameters of a function, and whether it takes any others too."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
