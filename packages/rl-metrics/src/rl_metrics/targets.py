"""A target for validation: which value counts, which validation is the best, and whether the target is reached."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from rl_core.errors import SettingsError
from rl_core.record_fields import FiniteFloat, settings_record
from rl_metrics.run_files.history import History
from rl_metrics.validation.summary import HEADLINE, headline

__all__ = [
    "EXACT",
    "TargetOptions",
    "Validated",
    "best_of",
    "best_to_keep",
    "num_since_best",
    "target_of",
    "validations_of",
]

SECTIONS = ("val-core/", "val-aux/", "sft/validation_")
MAIN = "validation (mean of val-core/*/mean@N)"
EXACT = "validation/is_exact"
"""1 if every token of a validation is from exactly its step's weights; asynchronous runs record it."""


@settings_record
class TargetOptions:
    """The validation metric that decides which checkpoint is the best, and the value that it should reach.

    Attributes:
        metric: Metric of validation, such as "val-core/math/acc/mean@1"; with none, the mean over data sources of
            `val-core/*/mean@N`.
        value: Value to reach; with none, the metric only selects the best checkpoint.
        stop: Stop the run once a validation after a training step has reached the value.
        lower_is_better: Whether the metric should fall to the value instead of rising to it.
    """

    metric: str | None = None
    value: FiniteFloat | None = None
    stop: bool = False
    lower_is_better: bool = False

    @property
    def label(self) -> str:
        """The metric's name in messages."""
        return self.metric or MAIN

    def problems(self) -> Iterator[str]:
        """Yield a message for each impossible option."""
        if self.metric is not None and not self.metric.startswith(SECTIONS):
            yield (
                f'metric must be a metric of validation, such as "val-core/math/acc/mean@1"; found {self.metric!r}. '
                "Names begin with val-core/ or val-aux/."
            )
        if self.value is None and self.stop:
            yield "stop = true needs a value to reach. Set value too."
        if self.lower_is_better and self.metric is None:
            yield "lower_is_better = true needs a metric; the main validation metric is better when it is higher."

    def is_better(self, value: float, than: float) -> bool:
        """Whether one value is strictly better than another."""
        return value < than if self.lower_is_better else value > than

    def is_reached(self, value: float) -> bool:
        """Whether a value reaches the target; False without one."""
        return self.value is not None and not self.is_better(self.value, value)

    def value_in(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value in a validation's metrics; None if it lacks a finite one."""
        value = headline(metrics) if self.metric is None else metrics.get(self.metric)
        return None if value is None or not math.isfinite(value) else float(value)

    def require_in(self, metrics: Mapping[str, float]) -> None:
        """Refuse a metric that a validation does not report.

        Raises:
            SettingsError: Names the nearest metric, or all main ones.
        """
        if self.metric is None or self.metric in metrics or not any(map(HEADLINE.fullmatch, metrics)):
            return
        known = [name for name in metrics if name.startswith(SECTIONS)]
        near = difflib.get_close_matches(self.metric, known, n=1)
        main = ", ".join(name for name in known if HEADLINE.fullmatch(name))
        hint = f"Did you mean {near[0]!r}?" if near else f"The main ones are {main}."
        raise SettingsError(f"validation does not report trainer.target.metric = {self.metric!r}. {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """One validation.

    Attributes:
        step: Number of finished steps.
        value: Value of the target's metric.
        is_exact: Whether its responses are from exactly that step's weights, which the step's checkpoint contains.
    """

    step: int
    value: float
    is_exact: bool = True


def validations_of(history: History, target: TargetOptions) -> tuple[Validated, ...]:
    """Return a run's validations with a finite value, by step."""
    names = filter(HEADLINE.fullmatch, history.values) if target.metric is None else (target.metric,)
    columns = {name: history.values[name] for name in names if name in history.values}
    validations = []
    exact = history.get(EXACT)
    for row in np.flatnonzero(np.isfinite(list(columns.values())).any(axis=0)) if columns else ():
        metrics = {name: float(column[row]) for name, column in columns.items() if np.isfinite(column[row])}
        value = target.value_in(metrics)
        if value is not None:
            is_exact = bool(exact is None or exact[row] != 0)
            validations.append(Validated(step=int(history.steps[row]), value=value, is_exact=is_exact))
    return tuple(validations)


def best_of(validations: Sequence[Validated], target: TargetOptions) -> Validated | None:
    """Return the best validation; of equal ones the first."""
    choose = min if target.lower_is_better else max
    return choose(validations, key=attrgetter("value"), default=None)


def best_to_keep(validations: Sequence[Validated], target: TargetOptions) -> Validated | None:
    """Return the best validation of a trained policy whose checkpoint has exactly the validated weights."""
    return best_of([validated for validated in validations if validated.step > 0 and validated.is_exact], target)


def num_since_best(validations: Sequence[Validated], target: TargetOptions) -> int:
    """Return how many validations followed the best one."""
    best = best_of(validations, target)
    return 0 if best is None else len(validations) - 1 - validations.index(best)


def target_of(settings: Mapping[str, Any]) -> TargetOptions:
    """Return the target in a run's recorded settings, or no target if those of another trainer have another form."""
    try:
        return msgspec.convert(settings["trainer"]["target"], TargetOptions)
    except (LookupError, TypeError, msgspec.ValidationError):
        return TargetOptions()
