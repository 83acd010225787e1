"""Objectives by name: built in, or another installed package's by entry point.

A package adds a policy loss in its pyproject.toml and is then found by the names of its entry points:

    [project.entry-points."rl_distill.policy_losses"]
    my_loss = "my_package.losses:my_loss"
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from rl_core.errors import SettingsError
from rl_distill.objectives.advantages import AdvantageEstimator, dr_grpo, grpo
from rl_distill.objectives.aggregation import AGGREGATIONS, RowWeights
from rl_distill.objectives.kl import KL_ESTIMATORS, KLEstimator
from rl_distill.objectives.policy_loss import PolicyLoss, ppo_clip

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Registry(Generic[FunctionT]):
    """Functions of one kind by name; nothing is imported from other packages before its name is asked for."""

    def __init__(self, kind: str, builtin: Mapping[str, FunctionT], *, entry_point_group: str | None = None) -> None:
        """Hold the built-in functions.

        Args:
            kind: What they are, for messages.
            builtin: Functions by name.
            entry_point_group: Group in which other packages offer theirs; None keeps the registry closed.
        """
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._builtin = dict(builtin)

    def names(self) -> list[str]:
        """Every name that `get` knows, sorted."""
        return sorted({*self._builtin, *(point.name for point in self._entry_points())})

    def get(self, name: str) -> FunctionT:
        """The function of this name.

        Raises:
            SettingsError: Unknown, offered by two packages, or its package cannot be imported.
        """
        offered = [point for point in self._entry_points() if point.name == name]
        if len(offered) + (name in self._builtin) > 1:
            places = ", ".join(point.value for point in offered)
            raise SettingsError(f"{self.kind} {name!r} is offered more than once ({places}). Rename the outside one.")
        if name in self._builtin:
            return self._builtin[name]
        if not offered:
            raise SettingsError(unknown_name(self.kind, name, self.names()))
        try:
            return cast(FunctionT, offered[0].load())
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{self.kind} {name!r} cannot be loaded from {offered[0].value}: {error}.") from error

    def get_with(self, name: str, options: Mapping[str, Any]) -> FunctionT:
        """The function of this name with keyword options bound.

        Raises:
            SettingsError: As `get`, or the function has no such option.
        """
        function = self.get(name)
        known, takes_any = _option_names(function)
        for option in options:
            if option not in known and not takes_any:
                raise SettingsError(unknown_name(f"option of {self.kind} {name!r}:", option, known))
        return cast(FunctionT, partial(function, **options)) if options else function

    def _entry_points(self) -> Iterable[Any]:
        return entry_points(group=self.entry_point_group) if self.entry_point_group else ()


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that nothing has: the nearest, and all known ones."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}."


def _option_names(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Keyword-only parameters of a function, and whether it takes any others too."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage", {"grpo": grpo, "dr_grpo": dr_grpo}, entry_point_group="rl_distill.advantages"
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", {"ppo_clip": ppo_clip}, entry_point_group="rl_distill.policy_losses"
)
KL: Registry[KLEstimator] = Registry("KL estimator", KL_ESTIMATORS)
AGGREGATION: Registry[RowWeights] = Registry("aggregation", AGGREGATIONS)
